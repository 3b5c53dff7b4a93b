"""A split at one time for all users, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ncr_core.data import build_interactions
from ncr_core.data.splits import temporal_split
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.by_gap import evaluate_temporal, metrics_by_gap
from ncr_core.reproduction.baselines.scoring import Popularity

DAY = 86_400.0

# The cut at .6 of 15 interactions is 10.4 days: 9 are before it.
ROWS = [
    *[("u", "a", 1), ("u", "b", 2), ("u", "c", 3), ("u", "d", 12), ("u", "e", 13)],
    *[("v", "d", 4), ("v", "a", 10), ("v", "b", 11)],
    *[("w", "c", 5), ("w", "d", 6), ("w", "b", 7)],
    ("one", "b", 9),
    *[("new", "a", 11), ("new", "b", 14)],
    ("one", "never", 15),
]


def _interactions() -> object:
    return build_interactions(((u, i, d * DAY) for u, i, d in ROWS), timed=True)


def test_users_with_items_on_both_sides_are_tested_on_the_first_after_the_cut() -> None:
    split = temporal_split(_interactions(), 0.6)  # type: ignore[arg-type]
    users, items = list(split.train.user_ids), np.array(split.train.item_ids)
    assert users == ["u", "v", "w", "one"]
    assert set(items) == {"a", "b", "c", "d"}
    assert split.newcomers == 1  # "new" has nothing before the cut
    assert split.untrained_test_items == 1  # that of "one"
    trained = [items[split.train.items_of(user)].tolist() for user in range(4)]
    assert trained == [["a", "b"], ["d"], ["c", "d"], ["b"]]
    assert [items[i] if i >= 0 else "" for i in split.validation] == ["c", "a", "b", ""]
    assert [items[i] if i >= 0 else "" for i in split.test] == ["d", "b", "", ""]
    np.testing.assert_array_equal(split.gaps, [9 * DAY, DAY, np.nan, np.nan])
    assert split.train.times is not None
    assert split.train.times.max() < split.cut
    assert items[split.test_input.items_of(0)].tolist() == ["a", "b", "c"]


def test_rare_items_are_those_that_are_rare_before_the_cut() -> None:
    split = temporal_split(_interactions(), 0.6, 2)  # type: ignore[arg-type]
    assert set(split.train.item_ids) == {"a", "b", "c", "d"}
    with pytest.raises(DataError, match="choose another quantile"):
        temporal_split(_interactions(), 0.6, 4)  # type: ignore[arg-type]


def test_a_data_set_without_times_is_one_clear_error() -> None:
    untimed = replace(_interactions(), times=None)  # type: ignore[type-var]
    with pytest.raises(DataError, match="has no times"):
        temporal_split(untimed)  # type: ignore[arg-type]


@pytest.mark.parametrize("quantile", [0.0, 1.0, -1.0, float("nan")])
def test_a_quantile_that_leaves_a_side_empty_is_refused(quantile: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        temporal_split(_interactions(), quantile)  # type: ignore[arg-type]


def test_nobody_on_both_sides_is_one_clear_error() -> None:
    rows = [("u", "a", 1.0), ("u", "b", 2.0), ("v", "a", 8.0), ("v", "b", 9.0)]
    with pytest.raises(DataError, match="choose another quantile"):
        temporal_split(build_interactions(rows, timed=True), 0.5)


def test_metrics_are_those_of_the_users_of_each_gap() -> None:
    ranks = np.array([0, -1, 1, -1])
    gaps = np.array([60.0, 3600.0, DAY, 40 * DAY])
    found = metrics_by_gap(ranks, gaps, 9)
    assert {name: (m.hr, m.users) for name, m in found.items()} == {
        "all": (0.5, 4), "up to 1 h": (0.5, 2), "1 h to 1 day": (1.0, 1), "over 30 days": (0.0, 1),
    }  # fmt: skip
    assert found["1 h to 1 day"].ndcg == pytest.approx(1 / np.log2(3))


def test_popularity_by_gap() -> None:
    split = temporal_split(_interactions(), 0.6)  # type: ignore[arg-type]
    found = evaluate_temporal(Popularity(split.train), split)
    # u has had all but "d"; v's unseen items are "b" (2 in training) and "c" (1).
    assert found["all"].hr == found["all"].ndcg == 1.0
    assert {name: m.users for name, m in found.items()} == {
        "all": 2, "1 h to 1 day": 1, "1 to 30 days": 1
    }  # fmt: skip
