"""The exact ranker equals the literal Algorithm 1: on random, intransitive and tied cases."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import (
    PAD,
    CandidateGenerator,
    ExactRanker,
    algorithm1,
    anchors_of,
    resumable_scan,
    spread_over_popularity,
)
from ncr_core.ranking import compiled as compiled_code
from tests.ncr_core.conftest import wild_model


def test_algorithm1_by_hand() -> None:
    # a > b > c > a, and d loses to all: the champion depends on the order.
    wins = {("a", "b"), ("b", "c"), ("c", "a"), ("a", "d"), ("b", "d"), ("c", "d")}
    beats = lambda x, y: (x, y) in wins  # noqa: E731
    assert algorithm1("abcd", beats, 4) == ["c", "a", "b", "d"]
    assert algorithm1("cbad", beats, 2) == ["a", "b"]
    assert algorithm1("dab", lambda x, y: False, 5) == ["d", "a", "b"]  # ties keep the champion
    assert algorithm1("", beats, 3) == []


def tournaments(rng: np.random.Generator, batch: int, width: int, ties: float) -> torch.Tensor:
    """(B, M, M) antisymmetric margins, a share of them zero."""
    upper = np.sign(rng.standard_normal((batch, width, width)))
    upper[rng.random(upper.shape) < ties] = 0
    upper = np.triu(upper, 1)
    return torch.from_numpy(upper - upper.transpose(0, 2, 1))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 12),
    width=st.integers(1, 40),
    k=st.integers(1, 45),
    ties=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    transitive=st.booleans(),
)
def test_the_scan_equals_algorithm1(
    seed: int, batch: int, width: int, k: int, ties: float, transitive: bool
) -> None:
    """About a thousand tournaments a run, mostly intransitive ones, with ragged lengths."""
    rng = np.random.default_rng(seed)
    margins = tournaments(rng, batch, width, ties)
    if transitive:
        scores = torch.from_numpy(rng.integers(0, 9, (batch, width)).astype(float))
        margins = scores.unsqueeze(2) - scores.unsqueeze(1)
    lengths = torch.from_numpy(rng.integers(0, width + 1, batch))

    ranked = resumable_scan(
        lambda rows, i, j: margins[rows.unsqueeze(1), i, j], lengths, min(k, width)
    )
    for row in range(batch):
        expected = algorithm1(
            range(int(lengths[row])),
            lambda i, j, row=row: bool(margins[row, i, j] > 0),  # type: ignore[misc]
            k,
        )
        assert [p for p in ranked[row].tolist() if p != PAD] == expected


def test_the_scan_sorts_transitive_margins_with_fewer_comparisons_than_algorithm1() -> None:
    asked = 0
    scores = torch.stack([torch.randperm(300) for _ in range(1024)])

    def margins(rows: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += i.numel()
        own = scores[rows]
        return (own.gather(1, i) - own.gather(1, j)).double()

    ranked = resumable_scan(margins, torch.full((1024,), 300), 10)
    assert ranked.equal(scores.argsort(dim=1, descending=True)[:, :10])
    literally = 1024 * sum(300 - p - 1 for p in range(10))
    assert asked < 0.75 * literally


def literal(
    model: PairwiseRanker, ranker: ExactRanker, user: int, candidates: list[int], k: int
) -> list[int]:
    """Algorithm 1 with one network call a comparison."""
    vector = model.user_vectors(torch.tensor([user]))

    def beats(i: int, j: int) -> bool:
        return bool(ranker.compare(vector, torch.tensor([[i]]), torch.tensor([[j]])) > 0)

    return algorithm1(candidates, beats, k)


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether towers are ranked by compiled code; numba is there wherever the tests are run."""
    chosen: bool = request.param
    return chosen


def test_the_ranker_equals_algorithm1_on_its_own_margins(
    config: ModelConfig, compiled: bool
) -> None:
    model = wild_model(config, 30, 25)
    with torch.no_grad():  # twins, which must tie exactly and fall in the candidates' order
        for name, table in model.named_parameters():
            if name.startswith("items"):
                table[20:] = table[:5]
    ranker = ExactRanker(model, compiled=compiled)
    rng = np.random.default_rng(1)
    rows = np.full((30, 18), PAD)
    for row in rows:
        length = rng.integers(0, 19)
        row[:length] = rng.permutation(25)[:length]
    users = model.user_vectors(torch.arange(30))
    ranked = ranker.rank(users, torch.from_numpy(rows), 12)
    assert ranked.shape == (30, 12)
    for user, row in enumerate(rows):
        expected = literal(model, ranker, user, [i for i in row.tolist() if i != PAD], 12)
        assert [i for i in ranked[user].tolist() if i != PAD] == expected


def test_an_order_does_not_depend_on_the_batch(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 40, 60)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(40))
    candidates = torch.stack([torch.randperm(60)[:50] for _ in range(40)])
    together = ranker.rank(users, candidates, 10)
    for user in range(40):
        one = slice(user, user + 1)
        assert ranker.rank(users[one], candidates[one], 10).equal(together[one])


def test_near_ties_are_decided_as_in_float64() -> None:
    """Items that differ by a rounding error of float32: its own margins are mostly noise."""
    model = wild_model(ModelConfig(kind="dncr", factors=8), 50, 40)
    table = model.get_parameter("items.weight")
    with torch.no_grad():
        table[20:] = table[:20] * (1 + 2**-22)
    users = model.user_vectors(torch.arange(50))
    i, j = torch.arange(20).expand(50, -1), torch.arange(20, 40).expand(50, -1)
    margins = ExactRanker(model).compare(users, i, j)
    exact = copy.deepcopy(model).double()
    u = users.double().repeat_interleave(20, dim=0)
    expected = exact.logits(u, i.flatten(), j.flatten()) - exact.logits(u, j.flatten(), i.flatten())
    assert expected.abs().max() < 1e-4
    assert margins.flatten().sign().equal(expected.sign())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(2, 5),
    factors=st.integers(1, 9),
    width=st.integers(1, 70),
    k=st.integers(1, 75),
    activation=st.sampled_from(["tanh", "relu"]),
    shared=st.booleans(),
    scale=st.sampled_from([1e-3, 0.3, 1.0, 8.0]),
)
def test_the_compiled_scan_equals_the_one_in_torch(
    seed: int,
    layers: int,
    factors: int,
    width: int,
    k: int,
    activation: Literal["tanh", "relu"],
    shared: bool,
    scale: float,
) -> None:
    """Random towers make tournaments of every kind: from one margin's size of ties and near ties to
    intransitive ones, and weights whose exponentials do not fit into float32."""
    kind: Literal["neupr", "dncr"] = "neupr" if shared or seed % 2 else "dncr"
    config = ModelConfig(
        kind=kind, factors=factors, layers=layers, activation=activation, shared_embeddings=shared
    )
    torch.manual_seed(seed)
    model = build_model(config, 9, 80).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=scale)
    for name, table in model.named_parameters():
        if name.startswith("items"):
            table[60:] = table[:20]
    candidates = torch.stack([torch.randperm(80)[:width] for _ in range(9)])
    lengths = torch.randint(0, width + 1, (9, 1))
    candidates = candidates.masked_fill(torch.arange(width) >= lengths, PAD)
    users = model.user_vectors(torch.arange(9))
    fast, slow = (ExactRanker(model, compiled=c) for c in (True, False))
    assert fast.compiled is not None
    assert fast.rank(users, candidates, k).equal(slow.rank(users, candidates, k))


def exact_answer(
    model: PairwiseRanker, user: torch.Tensor, candidates: list[int], k: int
) -> list[int]:
    """The literal Algorithm 1 on z_uij − z_uji as the equations have it, in float64."""
    exact = copy.deepcopy(model).double()
    n = len(candidates)
    i = torch.tensor(candidates).repeat_interleave(n)
    j = torch.tensor(candidates).repeat(n)
    users = user.double().expand(n * n, -1)
    margins = (exact.logits(users, i, j) - exact.logits(users, j, i)).view(n, n)
    # What is left of a tie is the rounding of two different sums.
    beats = lambda a, b: bool(margins[a, b] > 1e-12)  # noqa: E731
    return [candidates[at] for at in algorithm1(range(n), beats, k)]


@pytest.mark.parametrize("kind", ["dncr", "neupr"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("embeddings", "dense", "common"),
    [(0.7, 0.7, 0.0), (3.0, 3.0, 0.0), (30.0, 0.3, 0.0), (1e-5, 30.0, 0.0), (0.3, 0.7, 1e4)],
)
def test_the_answer_is_that_of_float64(
    kind: Literal["dncr", "neupr"],
    activation: Literal["tanh", "relu"],
    embeddings: float,
    dense: float,
    common: float,
    compiled: bool,
) -> None:
    """Also where float32 cannot tell: near twins, weights of uncommon sizes, and a large common
    part of the items, which cancels in a margin, since both sides are projected alike."""
    torch.manual_seed(3)
    model = build_model(ModelConfig(kind=kind, factors=4, activation=activation), 12, 40)
    model.requires_grad_(False)
    for name, table in model.named_parameters():
        is_embedding = name.startswith(("users", "items"))
        table.normal_(std=embeddings if is_embedding else dense)
        if name.startswith("items"):
            table += common
            table[20:] = table[:20] * (1 + 2**-12 * torch.randn(20, 1))
    users = model.user_vectors(torch.arange(12))
    candidates = torch.stack([torch.randperm(40)[:30] for _ in range(12)])
    ranked = ExactRanker(model, compiled=compiled).rank(users, candidates.int(), 8)
    for user in range(12):
        assert ranked[user].tolist() == exact_answer(
            model, users[user], candidates[user].tolist(), 8
        )


def test_what_overflows_in_float32_is_decided_in_float64(compiled: bool) -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2, layers=3, activation="relu"), 4, 20)
    with torch.no_grad():
        model.get_parameter("items.weight")[7] *= 3e38
    users = model.user_vectors(torch.arange(4))
    candidates = torch.stack([torch.randperm(20) for _ in range(4)])
    ranked = ExactRanker(model, compiled=compiled).rank(users, candidates, 20)
    for user in range(4):
        expected = exact_answer(model, users[user], candidates[user].tolist(), 20)
        assert ranked[user].tolist() == expected


def test_items_that_there_are_not_are_an_error(compiled: bool) -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 10)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(3))
    for wrong in (10, 10**9, -2):
        candidates = torch.tensor([[1, 2], [wrong, 3], [4, 5]])
        if wrong >= 0 or compiled:
            with pytest.raises(IndexError):
                ranker.mean_margins(users, torch.tensor([3, wrong]))
        if wrong >= 0:
            with pytest.raises(IndexError):
                ranker.rank(users, candidates, 2)


def test_several_threads_may_call_a_ranker() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=4), 40, 60)
    ranker = ExactRanker(model)
    users = model.user_vectors(torch.arange(40))
    candidates = torch.stack([torch.randperm(60)[:50] for _ in range(40)])
    expected = ranker.rank(users, candidates, 10)
    with ThreadPoolExecutor(6) as pool:
        lists = list(pool.map(lambda _: ranker.rank(users, candidates, 10), range(24)))
    assert all(ranked.equal(expected) for ranked in lists)


def test_without_compiled_code_lists_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 10)
    users = model.user_vectors(torch.arange(3))
    candidates = torch.arange(10).expand(3, -1)
    expected = ExactRanker(model).rank(users, candidates, 5)
    monkeypatch.setattr(compiled_code, "_kernel", lambda: None)
    ranker = ExactRanker(model)
    assert ranker.compiled is None
    assert ranker.rank(users, candidates, 5).equal(expected)


def test_a_full_disk_or_a_damaged_cache_costs_no_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba keeps its code on disk; where it cannot, it compiles for this process alone."""
    from ncr_core.ranking import kernel

    tried: list[str] = []

    def fails_once(_: object) -> None:
        tried.append("try")
        if len(tried) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled_code, "_try_out", fails_once)
    monkeypatch.setattr(kernel, "keep_nothing", lambda: tried.append("keep nothing"))
    assert compiled_code._kernel.__wrapped__() is kernel
    assert tried == ["try", "keep nothing", "try"]

    def fails(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled_code, "_try_out", fails)
    with pytest.warns(UserWarning, match="No space left"):
        assert compiled_code._kernel.__wrapped__() is None


def test_a_batch_is_split_over_threads_without_a_difference() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=8), 23, 60)
    ranker = ExactRanker(model)
    users = model.user_vectors(torch.arange(23))
    candidates = torch.stack([torch.randperm(60)[:40] for _ in range(23)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ranker.rank(users, candidates, 10)
        torch.set_num_threads(3)
        assert ranker.rank(users, candidates, 10).equal(alone)
    finally:
        torch.set_num_threads(before)


def test_degenerate_shapes(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 2, 5)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(2))
    assert ranker.rank(users, torch.tensor([[3], [4]]), 10).tolist() == [[3], [4]]
    assert ranker.rank(users, torch.full((2, 3), PAD), 2).eq(PAD).all()
    assert ranker.rank(users[:0], torch.empty((0, 4), dtype=torch.long), 2).shape == (0, 2)


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
    if ranker.compiled is not None:
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
