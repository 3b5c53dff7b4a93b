"""Boosts: the comparison of i and j gets b_i − b_j more, in every stage and by every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ncr_core.checkpoint import Checkpoint
from ncr_core.inference.engine import (
    InferenceEngine,
    RankedItem,
    RerankRequest,
    preference_probability,
)
from ncr_core.inference.retrieval import CandidateGenerator, ItemFilter, RankRequest, UserState
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import (
    ExactRanker,
    ExactRetriever,
    FaissRetriever,
    algorithm1,
    cheap_to_rank,
)
from tests.ncr_core.conftest import wild_model

USERS, ITEMS = 6, 40
TEMPERATURE = 1.7


def boosts(seed: int, n_items: int = ITEMS) -> np.ndarray:
    """Some items up, some down, some as they are."""
    drawn = np.random.default_rng(seed)
    values: np.ndarray = drawn.choice([0.0, 0.0, 1.5, -2.0, 6.0], n_items)
    return values


def literal_margins(model: PairwiseRanker, user: int, boost: np.ndarray) -> np.ndarray:
    """m_ij + b_i − b_j, by the network itself in float64."""
    n = model.n_items
    vector = model.user_vectors(torch.tensor([user])).double()
    i, j = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    network = model.double()
    users = vector.expand(len(i), -1)
    margins = (network.logits(users, i, j) - network.logits(users, j, i)).view(n, n).numpy()
    model.float()
    literal: np.ndarray = margins + boost[:, None] - boost[None, :]
    return literal


def test_every_backend_ranks_as_algorithm1_on_boosted_margins(
    config: ModelConfig, compiled: bool
) -> None:
    model = wild_model(config, USERS, ITEMS)
    ranker = ExactRanker(model, compiled=compiled)
    boost = boosts(1)
    vectors = model.user_vectors(torch.arange(USERS))
    bound = ranker.bind(vectors, torch.from_numpy(boost))
    candidates = torch.stack([torch.randperm(ITEMS)[:30] for _ in range(USERS)])
    ranked = bound.rank(candidates, 12)
    assert not ranked.equal(ranker.bind(vectors).rank(candidates, 12))
    all_margins = bound.margins.all_margins(candidates)
    others = torch.tensor([3, 8, 15])
    over_others, over_next = bound.margins.list_margins(ranked, others)
    means = bound.margins.mean_margins(others, torch.arange(ITEMS))
    every = ranker.mean_margins(vectors, others, torch.from_numpy(boost))
    for user in range(USERS):
        margins = literal_margins(model, user, boost)
        own = candidates[user].tolist()
        expected = algorithm1(own, lambda i, j, m=margins: bool(m[i, j] > 1e-12), 12)  # type: ignore[misc]
        assert ranked[user].tolist() == expected
        close = {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(all_margins[user], margins[np.ix_(own, own)], **close)
        listed = ranked[user].tolist()
        np.testing.assert_allclose(over_others[user], margins[np.ix_(listed, others)], **close)
        np.testing.assert_allclose(over_next[user, :-1], margins[listed[:-1], listed[1:]], **close)
        mean = margins[:, others].mean(axis=1)
        np.testing.assert_allclose(means[user], mean, **close)
        np.testing.assert_allclose(every[user], mean, **close)


def test_the_same_for_all_changes_nothing(config: ModelConfig) -> None:
    model = wild_model(config, USERS, ITEMS)
    ranker, vectors = ExactRanker(model), model.user_vectors(torch.arange(USERS))
    candidates = torch.stack([torch.randperm(ITEMS)[:30] for _ in range(USERS)])
    same = torch.full((ITEMS,), 8.0, dtype=torch.float64)
    plain = ranker.bind(vectors).rank(candidates, 20)
    assert ranker.bind(vectors, same).rank(candidates, 20).equal(plain)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_best_of_the_whole_catalogue_take_boosts_in(compiled: bool) -> None:
    for bias in (False, True):
        model = wild_model(ModelConfig(kind="nbpr", factors=4, item_bias=bias), USERS, 3_000)
        ranker, boost = ExactRanker(model, compiled=compiled), boosts(2, 3_000)
        vectors = model.user_vectors(torch.arange(USERS))
        items = torch.arange(3_000).expand(USERS, -1)
        scores = ranker.linear_scores(vectors, items).numpy() + boost
        allowed = torch.rand(USERS, 3_000) < 0.7
        top = ranker.top(vectors, 50, allowed, None, torch.from_numpy(boost))
        scores[~allowed.numpy()] = -np.inf
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :50]
        assert top.tolist() == expected.tolist()


def engine_of(model: PairwiseRanker, candidates: int) -> InferenceEngine:
    checkpoint = Checkpoint(
        model=model,
        user_ids=[f"u{n}" for n in range(model.n_users)],
        item_ids=[f"i{n}" for n in range(model.n_items)],
        item_counts=np.arange(model.n_items)[::-1].copy(),
        reference_items=[2, 11, 23, 31],
        manifest={"calibration": {"temperature": TEMPERATURE}},
    )
    return InferenceEngine(checkpoint, candidates)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbpr", "dncr", "neupr"])
def test_boosted_items_become_candidates_and_all_that_is_said_of_them_agrees(kind: str) -> None:
    config = ModelConfig(kind=kind, factors=3)  # type: ignore[arg-type]
    model = wild_model(config, USERS, 300)
    engine = engine_of(model, 20)
    everything = ItemFilter(np.ones(300, dtype=np.bool_))
    for user in range(USERS):
        plain = engine.rank([RankRequest(UserState(user), 300, everything)])[0]
        worst = [item.row for item in plain[-3:]]
        boost = np.zeros(300)
        boost[worst] = 200.0
        some = ItemFilter(everything.allowed, few=None)
        requests = [
            RankRequest(UserState(user), 10, some, boost=boost),
            RankRequest(UserState(user), 10, everything),
            RankRequest(UserState((user + 1) % USERS), 10, some, boost=boost),
        ]
        boosted, beside, _ = engine.rank(requests)
        assert {item.row for item in boosted[:3]} == set(worst)
        alone = engine.rank([RankRequest(UserState(user), 10, everything)])[0]
        assert beside == alone
        margins = literal_margins(model, user, boost)
        check_scores(boosted, margins, engine)
        rows = np.array(sorted({*worst, *range(40)}))
        ranked = engine.rerank([RerankRequest(UserState(user), rows, boost)])[0]
        expected = algorithm1(rows.tolist(), lambda i, j, m=margins: bool(m[i, j] > 1e-12), 99)  # type: ignore[misc]
        assert [item.row for item in ranked] == expected
        check_scores(ranked, margins, engine)


def check_scores(items: list[RankedItem], margins: np.ndarray, engine: InferenceEngine) -> None:
    references = engine.references.tolist()
    for item, after in zip(items, [*items[1:], None], strict=True):
        of_item = torch.from_numpy(margins[item.row, references])
        score = preference_probability(of_item, TEMPERATURE).mean()
        assert item.score == pytest.approx(score, abs=1e-5)
        if after is not None:
            ahead = torch.tensor(margins[item.row, after.row])
            assert item.preferred_over_next == pytest.approx(
                float(preference_probability(ahead, TEMPERATURE)), abs=1e-5
            )


def test_few_items_are_ranked_as_by_a_search() -> None:
    for kind in ("nbpr", "dncr", "neupr"):
        model = wild_model(ModelConfig(kind=kind, factors=3), USERS, 300)  # type: ignore[arg-type]
        engine = engine_of(model, 20)
        mask = np.zeros(300, dtype=np.bool_)
        mask[np.random.default_rng(3).choice(300, 40, replace=False)] = True
        allowed, seen = np.ones(300, dtype=np.bool_), np.flatnonzero(mask)[:3]
        few = ItemFilter(allowed, seen, None, None, mask, np.flatnonzero(mask))
        many = ItemFilter(allowed, seen, None, None, mask)
        for boost in (None, boosts(4, 300)):
            for n in (10, 30, 100):
                found = [
                    engine.rank([RankRequest(UserState(1), n, items, boost=boost)])[0]
                    for items in (few, many)
                ]
                assert found[0] == found[1]
                assert len(found[0]) == min(n, 37)


@pytest.mark.parametrize("tied", [1, 30, 250])
def test_lists_of_a_product_are_those_of_all_its_candidates(tied: int) -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=3), USERS, 300)
    with torch.no_grad():
        model.get_parameter("items.weight")[20 : 20 + tied] = torch.tensor([0.5, 0.5, 0.5])
    engine = engine_of(model, 200)
    everything = ItemFilter(np.ones(300, dtype=np.bool_))
    generator = engine.retriever._generator
    vectors = model.user_vectors(torch.arange(USERS))
    candidates = cheap_to_rank(
        generator.search(vectors, torch.ones((USERS, 300), dtype=torch.bool), 200)
    )
    ranked = engine.ranker.rank(vectors, candidates, 40).tolist()
    for n in (5, 40):
        requests = [RankRequest(UserState(user), n, everything) for user in range(USERS)]
        beside = [RankRequest(UserState(0), 90, everything)]
        for found in (engine.rank(requests), engine.rank(requests + beside)):
            rows = [[item.row for item in items] for items in found[:USERS]]
            assert rows == [items[:n] for items in ranked]


def test_shortlists_take_boosts_in() -> None:
    pytest.importorskip("faiss")
    model = wild_model(ModelConfig(kind="neupr", factors=4), USERS, 2_000)
    ranker = ExactRanker(model)
    vectors = model.user_vectors(torch.arange(USERS))
    allowed = torch.ones((USERS, 2_000), dtype=torch.bool)
    boost = torch.zeros(2_000, dtype=torch.float64)
    boost[[5, 700, 1_999]] = 300.0
    retrievers = (ExactRetriever(ranker.margins), FaissRetriever(ranker.margins, vectors, 50))
    for retriever in retrievers:
        generator = CandidateGenerator(ranker, [1, 2, 3], 0, retriever)
        found = generator.search(vectors, allowed, 10, boost)
        assert [{*row[:3]} for row in found.tolist()] == [{5, 700, 1_999}] * USERS
