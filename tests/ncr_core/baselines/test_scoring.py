"""Ranking by scores, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ncr_core.data.interactions import IntArray
from ncr_core.errors import ConfigError, TrainingError
from ncr_core.models.baselines.extras import require
from ncr_core.models.baselines.scoring import FactorModel, ScoreModel, Scores


class Fixed(ScoreModel):
    """Every user's scores are those given."""

    def __init__(self, *scores: float) -> None:
        self._scores = np.array(scores)

    def scores(self, users: IntArray) -> Scores:
        return np.tile(self._scores, (len(users), 1))


def ranked(model: ScoreModel, candidates: list[list[int]], k: int) -> list[list[int]]:
    result: list[list[int]] = model.rank(
        np.arange(len(candidates)), np.array(candidates), k
    ).tolist()
    return result


def test_the_highest_come_first_and_padding_last() -> None:
    model = Fixed(0.5, -2.0, 3.0)
    assert ranked(model, [[0, 1, 2], [1, 0, -1], [-1, 1, -1]], 3) == [
        [2, 0, 1],
        [0, 1, -1],
        [1, -1, -1],
    ]


def test_ties_keep_the_candidates_order() -> None:
    assert ranked(Fixed(1.0, 1.0, 1.0, 2.0), [[2, 0, 3, 1], [1, 2, 0, 3]], 4) == [
        [3, 2, 0, 1],
        [3, 1, 2, 0],
    ]


def test_there_are_at_most_k_and_at_most_as_many_as_candidates() -> None:
    model = Fixed(0.0, 1.0, 2.0)
    assert ranked(model, [[0, 1, 2]], 2) == [[2, 1]]
    assert ranked(model, [[0, 1]], 10) == [[1, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_raises(bad: float) -> None:
    model = Fixed(0.0, bad, 1.0)
    with pytest.raises(TrainingError, match="Fixed gives scores that are not finite"):
        model.rank(np.array([0]), np.array([[0, 1]]), 2)
    # only candidates have a place in the order
    assert ranked(model, [[0, 2, -1]], 2) == [[2, 0]]


def test_factors_by_hand() -> None:
    model = FactorModel(np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[1.0, 0.0], [3.0, 1.0]]))
    assert model.scores(np.array([1, 0, 1])).tolist() == [[0, -1], [1, 5], [0, -1]]


def test_factors_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"\(5, 3\).*\(7, 4\)"):
        FactorModel(np.zeros((5, 3)), np.zeros((7, 4)))


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"'no_such_library'.*collaborative-ranking\[research\]"):
        require("no_such_library.part", "research")
