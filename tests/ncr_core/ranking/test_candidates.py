"""Candidates: the best by a cheap score, in the order that is cheap to rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ncr_core.errors import ConfigError
from ncr_core.inference import retrieval
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.models import ModelConfig
from ncr_core.ranking import (
    PAD,
    ExactRanker,
    ExactRetriever,
    FaissRetriever,
    anchors_of,
    candidates,
    shortlist_for,
    spread_over_popularity,
)
from ncr_core.ranking.backends.numba_ranker import NumbaRanker
from tests.ncr_core.conftest import fill, wild_model


def test_candidates_of_an_additive_model_are_its_own_best() -> None:
    model = wild_model(ModelConfig(kind="nbpr", factors=4), 6, 50)
    ranker = ExactRanker(model)
    generator = CandidateGenerator(ranker, [3, 17, 40], seed=5)
    users = model.user_vectors(torch.arange(6))
    allowed = torch.rand(6, 50) < 0.5
    allowed[5] = False
    picked = generator.pick(generator.scores(users), allowed, 8)
    everything = torch.arange(50).masked_fill(~allowed, PAD)
    for user in range(6):
        mine = [i for i in picked[user].tolist() if i != PAD]
        own = everything[user][everything[user] != PAD].unsqueeze(0)
        if own.shape[1] == 0:
            assert mine == []
            continue
        best = ranker.rank(users[user : user + 1], own, 8)[0].tolist()
        assert sorted(mine) == sorted(best)
        assert mine == best[::-1]  # so few come from bad to good


def test_candidates_stand_in_the_order_that_is_cheap_to_rank(compiled: bool) -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=4), 5, 90)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name.startswith("items"):
                table[80:] = table[:10]  # equal scores
    generator = CandidateGenerator(ExactRanker(model, compiled=compiled), [3, 17, 40], seed=5)
    users = model.user_vectors(torch.arange(5))
    scores = generator.scores(users)
    allowed = torch.rand(5, 90) < 0.8
    picked = generator.pick(scores, allowed, 50)
    for user in range(5):
        free = allowed[user].nonzero().flatten().tolist()
        key = lambda i, user=user: (-float(scores[user, i]), int(generator.order[i]))  # noqa: E731
        best = sorted(free, key=key)[:50]
        assert picked[user].tolist() == best[32:] + best[:32][::-1]
    few = allowed.clone()
    few[:, 20:] = False
    short = generator.pick(scores, few, 50)
    assert all((row >= 0).sum() == n for row, n in zip(short, few.sum(dim=1), strict=True))


def test_mean_margins_of_the_compiled_code(config: ModelConfig) -> None:
    model = wild_model(config, 7, 45)
    users = model.user_vectors(torch.arange(7))
    anchors = torch.tensor([40, 2, 11])
    fast, slow = (
        ExactRanker(model, compiled=c).mean_margins(users, anchors) for c in (True, False)
    )
    assert torch.allclose(fast, slow, atol=1e-4, rtol=1e-5)
    items = torch.arange(45).expand(7, -1)
    expected = torch.stack(
        [ExactRanker(model).compare(users, items, anchor.expand(7, 45)) for anchor in anchors]
    ).mean(dim=0)
    assert torch.allclose(slow, expected, atol=1e-5)
    ranker = ExactRanker(model)
    alone = torch.cat([ranker.mean_margins(user[None], anchors) for user in users])
    if isinstance(ranker.backend, NumbaRanker):
        assert alone.equal(fast)  # whoever else is in the batch


@pytest.mark.parametrize(
    ("n", "expected"), [(0, []), (1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (16, [2, 6, 10, 14])]
)
def test_anchors_are_reference_items_at_equal_steps(n: int, expected: list[int]) -> None:
    assert anchors_of(range(n)) == expected


@pytest.mark.parametrize("n", [1, 3, 16])
def test_reference_items_spread_over_popularity(n: int) -> None:
    counts = torch.randperm(100)
    picked = spread_over_popularity(counts, n)
    assert len(picked) == len(set(picked.tolist())) == n
    assert counts[picked].tolist() == sorted(counts[picked].tolist(), reverse=True)


@pytest.mark.parametrize("kind", ["nbpr", "neupr"])
@pytest.mark.parametrize("index", [False, True])
def test_candidates_by_a_shortlist(
    kind: Literal["nbpr", "neupr"], index: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shortlist that holds everything they are those that scoring every item gives."""
    if index:
        pytest.importorskip("faiss")
        monkeypatch.setattr(candidates, "MIN_RECALL", 1.0)
        monkeypatch.setattr(candidates, "MAX_PROBED", 1.0)
    model = wild_model(ModelConfig(kind=kind, factors=4, item_bias=True), 9, 400)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(9))
    allowed = torch.rand(9, 400) < 0.5
    allowed[2] = torch.arange(400) < 7
    allowed[3] = False
    made = FaissRetriever(ranker.margins, users, 200) if index else ExactRetriever(ranker.margins)
    full = CandidateGenerator(ranker, [3, 17, 40], 5).search(users, allowed, 80)
    found = CandidateGenerator(ranker, [3, 17, 40], 5, made).search(users, allowed, 80)
    assert found.shape == full.shape
    for own, expected in zip(found, full, strict=True):
        assert own[own >= 0].tolist() == expected[expected >= 0].tolist()
    # In a shortlist that does not, the best of it.
    monkeypatch.setattr(retrieval, "SHORTLIST_FACTOR", 1)
    few = CandidateGenerator(ranker, [3, 17, 40], 5, made).search(users, allowed, 20)
    best = ExactRetriever(ranker.margins).search(users, allowed, 20)
    assert [sorted(row) for row in few.tolist()] == [sorted(row) for row in best.tolist()]


def test_which_catalogues_get_a_shortlist(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(kind: Literal["nbpr", "dncr", "neupr"]) -> str:
        model = wild_model(ModelConfig(kind=kind, factors=2), 4, 300)
        margins = ExactRanker(model).margins
        return type(shortlist_for(margins, model.user_vectors(torch.arange(4)))).__name__

    kinds: tuple[Literal["nbpr", "dncr", "neupr"], ...] = ("nbpr", "dncr", "neupr")
    assert [made(kind) for kind in kinds] == ["NoneType"] * 3
    monkeypatch.setattr(candidates, "MIN_ITEMS", 300)
    assert [made(kind) for kind in kinds] == ["NoneType", "NoneType", "ExactRetriever"]
    monkeypatch.setattr(candidates, "MIN_FAISS_ITEMS", 300)
    monkeypatch.setattr(candidates, "is_installed", lambda _: False)
    assert [made(kind) for kind in kinds] == ["NoneType", "NoneType", "ExactRetriever"]
    monkeypatch.setitem(sys.modules, "faiss", None)
    model = wild_model(ModelConfig(kind="nbpr", factors=2), 4, 300)
    margins, users = ExactRanker(model).margins, model.user_vectors(torch.arange(4))
    with pytest.raises(ConfigError, match="faiss"):
        FaissRetriever(margins, users)


def clustered(model: Any, n: int) -> None:
    """Moves items and users of an NBPR into ``n`` groups that are far from each other."""
    centres = 30 * torch.eye(model.items.weight.shape[1])[:n]
    with torch.no_grad():
        for table in (model.items.weight, model.users.weight):
            table.mul_(0.1).add_(centres[torch.arange(len(table)) % n])
        fill(model.weight, [1.0] * len(model.weight))


def test_an_index_is_searched_only_where_that_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(candidates, "MIN_FAISS_ITEMS", 4_000)
    config = ModelConfig(kind="nbpr", factors=16)
    unclustered, by_group = (wild_model(config, 64, 4_000) for _ in range(2))
    clustered(by_group, 12)
    users = torch.arange(64)
    margins = ExactRanker(unclustered).margins
    for again in range(2):  # the second takes the file of the first
        file = tmp_path / "empty"
        assert shortlist_for(margins, unclustered.user_vectors(users), file) is None
        (written,) = tmp_path.glob("empty.*")
        assert faiss.read_index(str(written)).ntotal == 0, again
    monkeypatch.setattr(candidates, "MAX_PROBED", 1.0)  # an empty file is never searched
    assert shortlist_for(margins, unclustered.user_vectors(users), tmp_path / "empty") is None
    monkeypatch.undo()
    ranker = ExactRanker(by_group)
    vectors = by_group.user_vectors(users)
    index = FaissRetriever(ranker.margins, vectors, 20, file=tmp_path / "full")
    assert index.is_quick
    allowed = torch.ones((64, 4_000), dtype=torch.bool)
    best = ExactRetriever(ranker.margins).search(vectors, allowed, 20).tolist()
    found = index.search(vectors, allowed, 20).tolist()
    held = sum(len(set(one) & set(other)) for one, other in zip(best, found, strict=True))
    assert held / (64 * 20) == pytest.approx(index.recall, abs=1e-3)
    assert index.recall >= candidates.MIN_RECALL
