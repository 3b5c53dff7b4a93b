"""What users who come back after a break get, in a world where each sitting has a topic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gaps import held_out_by
from benchmarks.served import EASE_L2
from ncr_core.data import build_interactions
from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.data.splits import Split, leave_latest_out
from ncr_core.data.synthetic import synthetic_sittings
from ncr_core.evaluation.protocols import ModelRanks, Ranks, evaluate_full
from ncr_core.models import PairwiseRanker
from ncr_core.models.user_embeddings import GAPS_SECONDS
from ncr_core.recipes import recipe
from ncr_core.reproduction.baselines.scoring import Popularity, fit_ease
from ncr_core.training import gaps, newcomers, train_model
from ncr_core.training.gaps import MIN_RETURNS, _breaks, item_vectors, learn_gaps

CLOSED = recipe("next-item").with_(factors=64)


@pytest.fixture(scope="module")
def world() -> Interactions:
    return build_interactions(synthetic_sittings(n_users=800, n_items=300), timed=True)


@pytest.fixture(scope="module")
def split(world: Interactions) -> Split:
    """The first item after each user's latest break is held out, with all that follows."""
    split, gaps = held_out_by(world, "return")
    test = split.test.copy()
    test[np.flatnonzero(test >= 0)[gaps <= GAPS_SECONDS[0]]] = -1
    return replace(split, test=test)


def breaks(interactions: Interactions) -> BoolArray:
    """(nnz,) whether the item was taken up more than an hour after the one before."""
    gaps = interactions.gaps()
    assert gaps is not None
    after: BoolArray = gaps > GAPS_SECONDS[0]
    return after


def trained(train: Interactions) -> PairwiseRanker:
    nothing = np.full(train.n_users, -1, dtype=np.int64)
    return train_model(CLOSED.model, CLOSED.training, Split(train, nothing, nothing)).model


def away(train: Interactions, number: int) -> IntArray:
    return np.full(train.n_users, number, dtype=np.int64)


@pytest.mark.slow
def test_who_comes_back_is_served_no_worse_than_by_popularity_or_ease(split: Split) -> None:
    train = split.train
    model = trained(train)
    before = ModelRanks(model)

    def ndcg(ranks: Ranks) -> float:
        return evaluate_full(ranks, split, split.test, seed=0).ndcg

    in_a_sitting = ndcg(before)
    learn_gaps(model, train, seed=0)
    assert model.fitted_gaps == {1, 2}
    for number in (1, 2):
        returning = ndcg(ModelRanks(model, away(train, number)))
        assert returning > 1.3 * in_a_sitting
        # Within the noise: the standard error is .008.
        assert returning > 0.97 * max(ndcg(Popularity(train)), ndcg(fit_ease(train, EASE_L2)))
    # In the middle of a sitting nothing has changed.
    assert ndcg(ModelRanks(model, away(train, 0))) == in_a_sitting == ndcg(ModelRanks(model))


@pytest.mark.slow
@pytest.mark.parametrize(("by_length", "share"), [(True, 0.05), (False, 0.05), (True, 0.0)])
def test_newcomers_are_nearer_to_popularity_after_a_training(
    by_length: bool, share: float, world: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first 20 users most keep at most five items: it is they who change."""
    monkeypatch.setattr(newcomers, "MAX_NEWCOMERS", share)
    place = np.arange(world.nnz) - world.indptr[world.users]
    train = world.select((world.users >= 20) | (place < 1 + 2 * (world.users % 4)))
    nothing = np.full(train.n_users, -1, dtype=np.int64)
    brief = recipe("next-item-nbpr").with_(
        factors=16, epochs=1, by_length=by_length, dropout=0.0, device="cpu"
    )
    split = Split(train, nothing, nothing)
    model = train_model(brief.model, brief.training, split).model
    before = train_model(brief.model, brief.training, split, shrink=False).model
    logits, old = (
        each.user_vectors(torch.arange(25)) @ item_vectors(each).T for each in (model, before)
    )
    popular = torch.from_numpy(train.item_counts()).float().log1p()

    def alike(scores: torch.Tensor) -> list[float]:
        return [float(torch.corrcoef(torch.stack([row, popular]))[0, 1]) for row in scores]

    for user, (new, earlier) in enumerate(zip(alike(logits), alike(old), strict=True)):
        newcomer = by_length and share and user < 20 and user % 4 < 3
        assert new > earlier if newcomer else new == earlier


def test_without_times_or_breaks_nothing_is_learned(world: Interactions) -> None:
    assert world.times is not None
    model = trained(world)
    position = np.arange(world.nnz, dtype=np.float64)
    few = position.copy()
    few[np.flatnonzero(breaks(world))[: MIN_RETURNS - 1]] += 1e5  # and back again after each
    for times in (None, position, few):
        learn_gaps(model, replace(world, times=times), seed=0)
        assert model.fitted_gaps == frozenset()


def test_breaks_after_which_users_go_on_as_before_do_no_harm(world: Interactions) -> None:
    """Here the pauses lie anywhere within a sitting: what came before still tells what is next."""
    before = np.cumsum(breaks(world))
    sitting = world.select(before == before[world.indptr[world.users]])
    pauses = np.random.default_rng(0).random(sitting.nnz) < 0.2
    pauses[sitting.indptr[:-1]] = False
    timed = replace(sitting, times=np.arange(sitting.nnz) + 1e5 * np.cumsum(pauses))
    split = leave_latest_out(timed)
    model = trained(split.train)
    learn_gaps(model, split.train, seed=0)

    def ndcg(number: int) -> float:
        ranks = ModelRanks(model, away(timed, number))
        return evaluate_full(ranks, split, split.test, seed=0).ndcg

    assert ndcg(2) > 0.95 * ndcg(0)


@pytest.mark.parametrize("block", [1, 3, 5, 2**20])
def test_breaks_are_the_same_by_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hour, day = 3_600.0, 86_400.0
    steps = [[0, 60, 2 * hour, 5 * day, 60], [0, 0.0], [], [0, 9 * day, hour, 3 * hour]]
    times = np.concatenate([1e9 * row + np.cumsum(own) for row, own in enumerate(steps)])
    indptr = np.cumsum([0, *map(len, steps)]).astype(np.int64)
    items = np.arange(len(times), dtype=np.int64)
    users, names = ["u"] * len(steps), ["i"] * len(items)
    data = Interactions(indptr, items, users, names, None, None, times)
    monkeypatch.setattr(gaps, "BLOCK", block)
    monkeypatch.setattr(gaps, "MAX_HELD_SHARE", 1.0)
    found = _breaks(data, np.random.default_rng(0))
    assert {number: at.tolist() for number, at in found.items()} == {1: [2, 10], 2: [3, 8]}
    monkeypatch.setattr(gaps, "MAX_RETURNS", 1)
    for number, at in _breaks(data, np.random.default_rng(0)).items():
        assert len(at) == 1
        assert set(at) <= set(found[number])
