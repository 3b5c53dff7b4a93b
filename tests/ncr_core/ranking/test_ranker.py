"""The exact ranker and its tournaments equal the literal Algorithm 1, whatever the margins."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ranker import certified, cyclic_share
from ncr_core.errors import ConfigError
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import PAD, ExactRanker, algorithm1
from ncr_core.ranking.algorithm1 import mean_preference, top_positions, wins
from ncr_core.ranking.backends import additive_topk
from ncr_core.ranking.backends.torch_ranker import resumable_scan, row_scan
from ncr_core.ranking.margins import lazy_property
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
    width=st.integers(1, 80),
    k=st.integers(1, 85),
    ties=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    transitive=st.booleans(),
)
def test_the_scans_equal_algorithm1(
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
        own = margins[row].numpy()
        by_rows, _ = row_scan(lambda i, j, own=own: own[i, j] > 0, int(lengths[row]), k)  # type: ignore[misc]
        assert by_rows == expected


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
    """Algorithm 1 by the margins of every item over every other one."""
    vector = model.user_vectors(torch.tensor([user]))
    items = torch.arange(model.n_items)
    pairs = torch.cartesian_prod(items, items).T.unsqueeze(1)
    beats = (ranker.compare(vector, *pairs) > 0).view(len(items), len(items)).tolist()
    return algorithm1(candidates, lambda i, j: beats[i][j], k)


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


def test_degenerate_shapes(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 2, 5)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(2))
    assert ranker.rank(users, torch.tensor([[3], [4]]), 10).tolist() == [[3], [4]]
    assert ranker.rank(users, torch.full((2, 3), PAD), 2).eq(PAD).all()
    assert ranker.rank(users[:0], torch.empty((0, 4), dtype=torch.long), 2).shape == (0, 2)


def test_how_a_list_fares_against_others(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 3, 40)
    users = model.user_vectors(torch.arange(3))
    others = torch.tensor([7, 31, 2, *range(9, 28)])  # more than one block of lanes
    ranked = torch.tensor([[5, 7, 0, 39], [1, 2, PAD, PAD], [PAD] * 4])
    ranker = ExactRanker(model, compiled=compiled)
    over_others, over_next = ranker.bind(users).margins.list_margins(ranked, others)
    for user, items in enumerate(ranked.tolist()):
        items = [item for item in items if item != PAD]
        for at, item in enumerate(items):
            one = torch.full((1, len(others)), item)
            expected = ranker.compare(users[user : user + 1], one, others.unsqueeze(0))[0]
            assert torch.allclose(over_others[user, at].double(), expected, atol=1e-4, rtol=1e-5)
            if at + 1 < len(items):
                pair = torch.tensor([[item]]), torch.tensor([[items[at + 1]]])
                margin = float(ranker.compare(users[user : user + 1], *pair))
                assert float(over_next[user, at]) == pytest.approx(margin, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("twins", [0, 5, 60])
@pytest.mark.parametrize("at_once", [12, 5])
def test_the_best_of_the_whole_catalogue(
    bias: bool, twins: int, at_once: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many items score the same in float32, or at all: more than are looked at twice."""
    monkeypatch.setattr(additive_topk, "MAX_SCORES", at_once * 200)
    config = ModelConfig(kind="nbpr", factors=4, item_bias=bias)
    model = wild_model(config, 12, 200)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name.startswith("items") or name == "bias":
                table[100 : 100 + twins] = table[7]
                table[7 : 7 + twins // 2] *= 1 + 1e-7  # nearly the same
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(12))
    order = torch.randperm(200)
    by_order = order.argsort()
    allowed = torch.rand(12, 200) < 0.7
    allowed[3], allowed[4] = False, torch.arange(200) < 4
    for k in (1, 10, 200, 300):
        for mask in (torch.ones_like(allowed), allowed):
            candidates = torch.full((12, 200), PAD)
            for user in range(12):
                own = by_order[mask[user][by_order]]
                candidates[user, : len(own)] = own
            expected = ranker.rank(users, candidates, k)
            assert ranker.top(users, k, mask, order).equal(expected)
            alone = [ranker.top(users[u : u + 1], k, mask[u : u + 1], order) for u in range(12)]
            assert torch.cat(alone).equal(expected)
    plain = ranker.rank(users, torch.arange(200).expand(12, -1), 10)
    assert ranker.top(users, 10).equal(plain)


@pytest.mark.parametrize("n_items", [5_000, 4_000 + 31, 32 * 60])
def test_the_best_of_a_larger_catalogue(n_items: int, compiled: bool) -> None:
    """Where not every item is looked for by itself; the best may be in the last, short group."""
    model = wild_model(ModelConfig(kind="nbpr", factors=4), 8, n_items)
    with torch.no_grad():
        model.get_parameter("items.weight")[-3:] *= 4
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(8))
    everything = torch.arange(n_items).expand(8, -1)
    for k in (10, 60, 300, 1_000):
        assert ranker.top(users, k).equal(ranker.rank(users, everything, k))
    allowed = torch.rand(8, n_items) < 0.002
    found = ranker.top(users, 10, allowed)
    for user in range(8):
        own = everything[user][allowed[user]].unsqueeze(0)
        best = ranker.rank(users[user : user + 1], own, 10)[0].tolist()
        assert [i for i in found[user].tolist() if i >= 0] == best


def test_only_products_of_vectors_are_ranked_without_candidates() -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2), 2, 9)
    with pytest.raises(ValueError, match="rank candidates"):
        ExactRanker(model).top(model.user_vectors(torch.arange(2)), 3)


def tournament(rng: np.random.Generator, m: int) -> torch.Tensor:
    upper = np.triu(rng.standard_normal((m, m)), 1)
    return torch.from_numpy(upper - upper.T).unsqueeze(0)


def test_by_hand() -> None:
    # a > b > c > a, and each of them beats d; then a candidate that is not there.
    margins = torch.zeros(1, 5, 5)
    for i, j, by in ((0, 1, 2.0), (1, 2, 0.5), (2, 0, 1.0), (0, 3, 1.0), (1, 3, 1.0), (2, 3, 4.0)):
        margins[0, i, j], margins[0, j, i] = by, -by
    lengths = torch.tensor([4])
    won = wins(margins, lengths)
    assert won.tolist() == [[2, 2, 2, 0, -1]]
    assert top_positions(won, lengths, 3).tolist() == [[0, 1, 2]]  # ties: as they stand
    assert cyclic_share(won, lengths).tolist() == [0.25]
    assert not certified(won, lengths, 1).item()
    mean = mean_preference(margins, lengths)[0]
    sigmoid = lambda x: 1 / (1 + np.exp(-x / 2))  # noqa: E731
    assert mean[0].item() == pytest.approx((sigmoid(2.0) + sigmoid(-1.0) + sigmoid(1.0)) / 3)
    assert mean[2].item() == pytest.approx((sigmoid(1.0) + sigmoid(-0.5) + sigmoid(4.0)) / 3)
    assert top_positions(mean_preference(margins, lengths), lengths, 5).tolist() == [
        [2, 0, 1, 3, PAD]
    ]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), m=st.integers(1, 12), k=st.integers(1, 13))
def test_what_is_certified_is_algorithm1_in_any_order(seed: int, m: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    margins = tournament(rng, m)
    if seed % 2:  # transitive but for some pair
        margins = (torch.arange(m)[None] - torch.arange(m)[:, None]).double().unsqueeze(0)
        if m > 2:
            i, j = rng.permutation(m)[:2]
            margins[0, i, j], margins[0, j, i] = margins[0, j, i].clone(), margins[0, i, j].clone()
    lengths = torch.tensor([m])
    won = wins(margins, lengths)
    cycles = sum(
        sorted(int(won_in) for won_in in (margins[0][np.ix_(t, t)] > 0).sum(dim=1)) == [1, 1, 1]
        for t in combinations(range(m), 3)
    )
    triples = m * (m - 1) * (m - 2) // 6
    assert cyclic_share(won, lengths).item() == pytest.approx(cycles / max(1, triples))
    if certified(won, lengths, k).item():
        expected = top_positions(won, lengths, k)[0].tolist()
        for _ in range(3):
            order = rng.permutation(m).tolist()
            assert algorithm1(order, lambda i, j: bool(margins[0, i, j] > 0), k) == expected


def test_the_ranker_by_wins_and_by_mean_probability(config: ModelConfig, compiled: bool) -> None:
    model = wild_model(config, 12, 40)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(12))
    candidates = torch.stack([torch.randperm(40)[:33] for _ in range(12)])
    lengths = torch.randint(0, 34, (12,))
    candidates[torch.arange(33) >= lengths.unsqueeze(1)] = PAD
    margins = ranker.all_margins(users, candidates)
    items = candidates.clamp(min=0)
    for i, j in ((0, 5), (31, 2), (17, 32)):
        both = lengths > max(i, j)
        expected = ranker.compare(users, items[:, i : i + 1], items[:, j : j + 1])[:, 0]
        assert torch.allclose(margins[both, i, j].double(), expected[both], atol=2e-4, rtol=1e-4)
        assert margins[both, i, j].sign().equal(expected[both].sign().to(margins.dtype))
        assert margins[~both, i, j].eq(0).all()
    for strategy, score in (("copeland", wins), ("borda", mean_preference)):
        ranked = ranker.rank(users, candidates, 9, strategy)  # type: ignore[arg-type]
        places = top_positions(score(margins, lengths), lengths, 9)
        expected_items = items.gather(1, places.clamp(min=0)).masked_fill(places == PAD, PAD)
        assert ranked.equal(expected_items)
    with pytest.raises(ConfigError, match="unknown strategy"):
        ranker.rank(users, candidates, 9, "condorcet")  # type: ignore[arg-type]


def test_what_a_batch_computes_once_waits_for_no_other_batch() -> None:
    """Python 3.11's `functools.cached_property` has one lock for all objects of a class."""
    both, computed = threading.Barrier(2, timeout=10), []

    class Batch:
        @lazy_property
        def value(self) -> int:
            both.wait()  # until the other one is computed, too
            computed.append(self)
            return id(self)

    batches = [Batch(), Batch()]
    with ThreadPoolExecutor(2) as threads:
        values = list(threads.map(lambda batch: batch.value, batches))
    assert values == [id(batch) for batch in batches]
    assert [batch.value for batch in batches] == values
    assert len(computed) == 2


def test_mean_margins_are_the_means_of_the_margins_also_where_float32_overflows() -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2, layers=3, activation="relu"), 4, 20)
    with torch.no_grad():
        table = model.get_parameter("items.weight")
        table[7:] = 3e38 * table[7:].sign()
    ranker = ExactRanker(model, compiled=False)
    users = model.user_vectors(torch.arange(4))
    anchors = torch.tensor([1, 5, 9])
    means = ranker.mean_margins(users, anchors)
    items = torch.arange(20).repeat_interleave(3).expand(4, -1)
    margins = ranker.compare(users, items, anchors.repeat(20).expand(4, -1))
    expected = margins.view(4, 20, 3).mean(dim=2)
    assert expected.isfinite().all()
    assert torch.allclose(means, expected, rtol=1e-5, atol=1e-5)
    none = torch.zeros(0, dtype=torch.long)
    assert ranker.bind(users).margins.mean_margins(none, torch.arange(20)).eq(0).all()
