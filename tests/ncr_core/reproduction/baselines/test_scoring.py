"""Ranking by scores, by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from ncr_core.data import Interactions, Split, build_interactions
from ncr_core.data.interactions import IntArray
from ncr_core.errors import ConfigError, DataError, TrainingError
from ncr_core.evaluation.protocols import evaluate_sampled, sampled_candidates
from ncr_core.optional_imports import require
from ncr_core.ranking import PAD
from ncr_core.reproduction.baselines import ease
from ncr_core.reproduction.baselines.als import EALSConfig, IALSConfig, fit_eals, fit_ials
from ncr_core.reproduction.baselines.cornac_bpr import fit_cornac_bpr
from ncr_core.reproduction.baselines.ease import MAX_ITEMS, fit_ease
from ncr_core.reproduction.baselines.scoring import FactorModel, Popularity, ScoreModel, Scores
from tests.ncr_core.reproduction.conftest import dense, small_matrix


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


FITS: dict[str, Callable[[Interactions], ScoreModel]] = {
    "popularity": Popularity,
    "ease": lambda train: fit_ease(train, 50.0),
    "eals": lambda train: fit_eals(train, EALSConfig(c0=20.0, l2=1.0, iterations=10)),
    "ials": lambda train: fit_ials(train, IALSConfig(factors=8, l2=0.02)),
    "cornac_bpr": lambda train: fit_cornac_bpr(train, 8, iterations=50, seed=0),
}
LIBRARIES = {"ials": "implicit", "cornac_bpr": "cornac"}


@pytest.fixture(scope="module")
def train(split: Split) -> Interactions:
    """The training data with a user and an item at the end that have no interactions."""
    users = [*split.train.user_ids, "nobody"]
    return split.train.reindex(users, [*split.train.item_ids, "nothing"])


@pytest.fixture(scope="module", params=list(FITS))
def model(request: pytest.FixtureRequest, train: Interactions) -> ScoreModel:
    name: str = request.param
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    return FITS[name](train)


@pytest.fixture(scope="module")
def candidates(train: Interactions) -> np.ndarray:
    """(n_users, 30) different items, the first rows padded to lengths from 0."""
    rng = np.random.default_rng(5)
    rows = np.array([rng.permutation(train.n_items)[:30] for _ in range(train.n_users)])
    for length in range(30):
        rows[length, length:] = PAD
    return rows


def test_a_rank_is_a_permutation_of_the_candidates_padded_right(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    ranked = model.rank(np.arange(train.n_users), candidates, 50)
    assert ranked.shape == candidates.shape
    for before, after in zip(candidates, ranked, strict=True):
        length = (before != PAD).sum()
        assert sorted(after[:length]) == sorted(before[:length])
        assert (after[length:] == PAD).all()


def test_the_first_k_are_the_start_of_the_whole_order(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    users = np.arange(train.n_users)
    whole = model.rank(users, candidates, 30)
    assert (model.rank(users, candidates, 7) == whole[:, :7]).all()


def test_a_user_gets_the_same_whoever_else_is_asked_for(
    model: ScoreModel, train: Interactions, candidates: np.ndarray
) -> None:
    users = np.random.default_rng(0).permutation(train.n_users)
    together = model.scores(users)
    ranked = model.rank(users, candidates[users], 10)
    for row in range(0, len(users), 17):
        one = users[row : row + 1]
        assert (model.scores(one)[0] == together[row]).all()
        assert (model.rank(one, candidates[one], 10)[0] == ranked[row]).all()


def test_users_and_items_without_interactions_have_finite_scores(
    model: ScoreModel, train: Interactions
) -> None:
    scores = model.scores(np.array([0, train.n_users - 1]))
    assert scores.shape == (2, train.n_items)
    assert np.isfinite(scores).all()


def test_it_beats_a_random_order(model: ScoreModel, split: Split) -> None:
    found = evaluate_sampled(model, sampled_candidates(split, split.test, seed=0))
    by_chance = 10 / found.items
    assert found.hr > 2 * by_chance


@pytest.mark.parametrize("rows", [1024, 7])
def test_each_column_is_the_ridge_regression_on_the_other_items(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ease, "_ROWS", rows)
    train, l2 = small_matrix(), 2.5
    weights = fit_ease(train, l2).weights
    x = dense(train)
    gram = x.T @ x
    assert (np.diag(weights) == 0).all()
    for item in range(train.n_items):
        rest = np.arange(train.n_items) != item
        penalised = gram[np.ix_(rest, rest)] + l2 * np.eye(train.n_items - 1)
        expected = np.linalg.solve(penalised, gram[rest, item])
        np.testing.assert_allclose(weights[rest, item], expected, atol=1e-6)


def test_scores_are_sums_over_the_users_items() -> None:
    train = small_matrix()
    model = fit_ease(train, 1.0)
    found = model.scores(np.arange(train.n_users))
    np.testing.assert_allclose(found, dense(train) @ model.weights, atol=1e-6)


def test_a_matrix_that_would_not_fit_is_refused() -> None:
    ids = [str(item) for item in range(MAX_ITEMS + 1)]
    one = np.zeros(1, dtype=np.int64)
    train = Interactions.from_arrays(one, one, user_ids=["u"], item_ids=ids)
    with pytest.raises(ConfigError, match=r"at most 20,000 items: for 20,001 .* 10 GB"):
        fit_ease(train, 1.0)


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan")])
def test_a_penalty_that_cannot_be(l2: float) -> None:
    with pytest.raises(ConfigError, match="l2 must be above 0"):
        fit_ease(build_interactions([("u", "x", 0)]), l2)


@pytest.fixture
def _library() -> None:
    pytest.importorskip("cornac", reason="cornac is not installed: extra 'cornac'")


@pytest.mark.usefixtures("_library")
def test_users_items_and_biases_keep_their_places() -> None:
    train = small_matrix()
    model = fit_cornac_bpr(train, 6, iterations=300, seed=0)
    assert model.user_factors.shape == (train.n_users, 7)
    assert model.item_factors.shape == (train.n_items, 7)
    assert (model.user_factors[:, -1] == 1).all()
    assert model.seconds > 0
    r, scores = dense(train)[:-1], model.scores(np.arange(train.n_users - 1))
    # what was learned is that a user's own items come first
    own = (scores * r).sum(axis=1) / r.sum(axis=1)
    others = (scores * (1 - r)).sum(axis=1) / (1 - r).sum(axis=1)
    assert (own > others).all()
    # items get rarer from the first to the last
    assert model.item_factors[0, -1] > model.item_factors[-1, -1]


@pytest.mark.usefixtures("_library")
def test_a_seed_makes_it_repeatable() -> None:
    first, again = (fit_cornac_bpr(small_matrix(), 3, iterations=5, seed=4) for _ in range(2))
    assert (first.item_factors == again.item_factors).all()


@pytest.mark.usefixtures("_library")
def test_nothing_to_learn_from() -> None:
    none = np.array([], dtype=np.int64)
    empty = Interactions.from_arrays(none, none, user_ids=["u"], item_ids=["x"])
    with pytest.raises(DataError, match="no interactions"):
        fit_cornac_bpr(empty, 2)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cornac.models", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[cornac\]"):
        fit_cornac_bpr(small_matrix(), 2)
