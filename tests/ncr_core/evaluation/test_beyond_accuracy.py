"""Statistics of lists, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ncr_core.data import Interactions, build_interactions
from ncr_core.evaluation.beyond_accuracy import list_statistics
from ncr_core.ranking import PAD


@pytest.fixture
def train() -> Interactions:
    """Four users; item 0 has three of them, items 1 and 2 one, item 3 none."""
    rows = [("u0", "i0"), ("u1", "i0"), ("u2", "i0"), ("u2", "i1"), ("u3", "i2")]
    few = build_interactions((user, item, 0.0) for user, item in rows)
    return few.reindex(few.user_ids, [*few.item_ids, "i3"])


def test_statistics_by_hand(train: Interactions) -> None:
    users = np.array([0, 2, 3])
    lists = np.array([[1, 3], [3, PAD], [0, 1]])
    statistics = list_statistics(users, lists, train)
    assert statistics.coverage == 3 / 4
    # Items are in 0, 1, 2 and 2 lists: (−3 · 0 − 1 · 1 + 1 · 2 + 3 · 2) / (4 · 5)
    assert statistics.gini == pytest.approx(7 / 20)
    # Item 1 has one of four users, 2 bits, twice; item 3 none, which counts as one, twice; item 0
    # has three.
    assert statistics.novelty == pytest.approx((4 * 2 + np.log2(4 / 3)) / 5)
    shown = np.mean([(1 / 4 + 0) / 2, 0, (3 / 4 + 1 / 4) / 2])
    own = np.mean([3 / 4, (3 / 4 + 1 / 4) / 2, 1 / 4])
    assert statistics.popularity_lift == pytest.approx(shown / own - 1)


def test_users_without_interactions_have_no_popularity_of_their_own(train: Interactions) -> None:
    grown = train.reindex([*train.user_ids, "u4"], train.item_ids)
    lists = np.array([[0], [0]])
    lift = list_statistics(np.array([0, 4]), lists, grown).popularity_lift
    assert lift == pytest.approx(0.0)


def test_the_same_items_for_everybody_are_as_unequal_as_it_gets(train: Interactions) -> None:
    statistics = list_statistics(np.arange(4), np.zeros((4, 1), dtype=np.int64), train)
    assert statistics.coverage == 1 / 4
    assert statistics.gini == 3 / 4


def test_nothing_to_count_is_refused(train: Interactions) -> None:
    with pytest.raises(ValueError, match="lists of at least one item"):
        list_statistics(np.array([0]), np.array([[PAD]]), train)
    with pytest.raises(ValueError, match="users need interactions"):
        list_statistics(np.array([], dtype=np.int64), np.empty((0, 2), dtype=np.int64), train)
