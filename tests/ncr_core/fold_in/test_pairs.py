"""Which pairs a user's vector is fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncr_core.errors import ConfigError, DataError
from ncr_core.fold_in import Evidence, FoldInConfig
from ncr_core.fold_in.pairs import PairMaker, Pairs

N = 200
EVEN = FoldInConfig(half_life=0.0, strength=2.0)


def rows(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def as_set(pairs: Pairs) -> set[tuple[int, int, float]]:
    triples = zip(pairs.winners, pairs.losers, pairs.weights, strict=True)
    return {(int(i), int(j), round(float(w), 12)) for i, j, w in triples}


def total_of(pairs: Pairs, *, winner: int | None = None, loser: int | None = None) -> float:
    of = pairs.winners == winner if winner is not None else pairs.losers == loser
    return float(pairs.weights[of].sum())


def test_each_event_beats_items_that_the_user_does_not_know() -> None:
    pairs = PairMaker(N, EVEN).of(Evidence(rows(5, 9, 3), np.array([1.0, 3.0, 0.5])))
    assert set(pairs.winners.tolist()) == {5, 9, 3}
    assert not {5, 9, 3} & set(pairs.losers.tolist())
    assert (pairs.weights > 0).all()
    for item, weight in ((5, 1.0), (9, 3.0), (3, 0.5)):
        assert total_of(pairs, winner=item) == pytest.approx(2.0 * weight)
        assert len(np.unique(pairs.losers[pairs.winners == item])) > 50


def test_order_counts_by_age_alone() -> None:
    maker = PairMaker(N, EVEN)
    assert as_set(maker.of(Evidence(rows(5, 9, 3)))) == as_set(maker.of(Evidence(rows(3, 5, 9))))
    aged = PairMaker(N, FoldInConfig(half_life=2.0, strength=1.0))
    pairs = aged.of(Evidence(rows(7, 8, 9)))
    for item, share in ((7, 0.5), (8, 0.5**0.5), (9, 1.0)):
        assert total_of(pairs, winner=item) == pytest.approx(share)


def test_what_is_long_ago_or_beyond_the_limit_is_left_out() -> None:
    aged = PairMaker(N, FoldInConfig(half_life=1.0))
    assert set(aged.of(Evidence(np.arange(100))).winners.tolist()) == set(range(93, 100))
    limited = PairMaker(N, FoldInConfig(half_life=0.0, events=3))
    assert set(limited.of(Evidence(np.arange(100))).winners.tolist()) == {97, 98, 99}


@pytest.mark.parametrize("events", [1, 7, 200, 5_000])
def test_pairs_are_bounded_whatever_the_number_of_events(events: int) -> None:
    config = FoldInConfig(half_life=0.0, events=10_000)
    pairs = PairMaker(20_000, config).of(Evidence(np.arange(events)))
    assert 0 < len(pairs.weights) <= max(config.pairs, events)


def test_a_disliked_item_loses_every_pair_and_more_than_a_liked_one_wins() -> None:
    evidence = Evidence(rows(5, 9, 3), disliked=rows(9, 40), disliked_weights=np.array([1.0, 2.0]))
    pairs = PairMaker(N, EVEN).of(evidence)
    assert not {9, 40} & set(pairs.winners.tolist())
    assert {(5, 40), (3, 40), (5, 9)} <= set(
        zip(pairs.winners.tolist(), pairs.losers.tolist(), strict=True)
    )
    assert total_of(pairs, loser=9) == pytest.approx(2.0 * EVEN.dislike)
    assert total_of(pairs, loser=40) == pytest.approx(4.0 * EVEN.dislike)
    assert total_of(pairs, winner=5) > total_of(PairMaker(N, EVEN).of(Evidence(rows(5))), winner=5)
    alone = PairMaker(N, EVEN).of(Evidence(disliked=rows(40)))
    assert set(alone.losers.tolist()) == {40}
    assert 40 not in alone.winners


def test_stated_pairs_are_pairs_of_their_own() -> None:
    stated = np.array([[1, 2], [2, 3], [3, 1]])  # a cycle is fine
    pairs = PairMaker(N, EVEN).of(Evidence(pairs=stated))
    assert as_set(pairs) == {(1, 2, 2.0), (2, 3, 2.0), (3, 1, 2.0)}
    both = PairMaker(N, EVEN).of(Evidence(rows(1), pairs=stated), likes=False)
    assert as_set(both) == as_set(pairs)


def test_nothing_known_and_everything_known() -> None:
    maker = PairMaker(4, EVEN)
    assert len(maker.of(Evidence()).weights) == 0
    assert len(maker.of(Evidence(np.arange(4))).weights) == 0  # nothing to compare with
    assert set(maker.of(Evidence(rows(0, 1, 2))).losers.tolist()) == {3}
    # All that there is to lose to is disliked as well.
    assert len(maker.of(Evidence(disliked=np.arange(4))).weights) == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"items": rows(1, 200)}, IndexError),
        ({"items": rows(-1)}, IndexError),
        ({"disliked": rows(200)}, IndexError),
        ({"pairs": np.array([[0, 200]])}, IndexError),
        ({"pairs": np.array([[3, 3]])}, DataError),
        ({"pairs": np.array([3, 4])}, DataError),
        ({"items": rows(1), "weights": np.array([0.0])}, DataError),
        ({"items": rows(1), "weights": np.array([np.nan])}, DataError),
        ({"items": rows(1), "weights": np.array([1.0, 2.0])}, DataError),
        ({"disliked": rows(1), "disliked_weights": np.array([-1.0])}, DataError),
    ],
)
def test_evidence_that_does_not_fit(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Evidence(**wrong).check(N)


@pytest.mark.parametrize(
    "wrong",
    [{"strength": 0.0}, {"half_life": -1.0}, {"steps": 0}, {"pairs": 0}, {"tolerance": np.inf}],
)
def test_settings_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FoldInConfig(**wrong)
