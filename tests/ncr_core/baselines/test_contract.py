"""What every baseline that ranks by scores has to keep to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ncr_core.data import Interactions, Split
from ncr_core.evaluation.protocols import evaluate_sampled, sampled_candidates
from ncr_core.models.baselines.cornac_bpr import fit_cornac_bpr
from ncr_core.models.baselines.eals import EALSConfig, fit_eals
from ncr_core.models.baselines.ease import fit_ease
from ncr_core.models.baselines.ials import IALSConfig, fit_ials
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.models.baselines.scoring import ScoreModel
from ncr_core.ranking import PAD

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
