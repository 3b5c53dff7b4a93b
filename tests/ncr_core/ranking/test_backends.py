"""Rankers in compiled code, for a CPU and for a GPU, equal those in torch."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import PAD, ExactRanker, algorithm1
from ncr_core.ranking.backends import numba_ranker
from ncr_core.ranking.backends.numba_ranker import NumbaRanker
from ncr_core.ranking.backends.torch_ranker import TorchRanker
from ncr_core.ranking.backends.triton_ranker import TritonRanker, triton_ranker
from tests.ncr_core.conftest import wild_model


@settings(max_examples=60, deadline=None)
@example(0, 3, 5, 51, 1, "relu", True, 8.0)  # twins, with weights that make large sums
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
    assert isinstance(fast.backend, NumbaRanker)
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


@pytest.mark.slow
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
            # Twins of the smallest embeddings would be ties that the rounding of a CPU decides.
            if embeddings > 1e-3:
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


@pytest.mark.parametrize("kind", ["nbpr", "dncr"])
def test_items_that_there_are_not_are_an_error(
    kind: Literal["nbpr", "dncr"], compiled: bool
) -> None:
    model = wild_model(ModelConfig(kind=kind, factors=2), 3, 10)
    ranker = ExactRanker(model, compiled=compiled)
    users = model.user_vectors(torch.arange(3))
    for wrong in (10, 10**9, -2):
        candidates = torch.tensor([[1, 2], [wrong, 3], [4, 5]])
        if wrong >= 0 or (compiled and kind == "dncr"):
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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    factors=st.integers(1, 70),
    width=st.integers(1, 40),
    k=st.integers(1, 45),
    scale=st.sampled_from([1e-9, 0.3, 30.0]),
    bias=st.booleans(),
    boosted=st.booleans(),
    double=st.booleans(),
)
def test_compiled_scores_of_candidates_give_the_lists_of_torch(
    seed: int,
    factors: int,
    width: int,
    k: int,
    scale: float,
    bias: bool,
    boosted: bool,
    double: bool,
) -> None:
    """Also with equal items, which tie, and with padding; alone a user has the same list."""
    torch.manual_seed(seed)
    config = ModelConfig(kind="nbpr", factors=factors, item_bias=bias)
    model = build_model(config, 5, 40).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=scale)
    for table in ("items.weight", *(("bias",) if bias else ())):
        model.get_parameter(table)[30:] = model.get_parameter(table)[:10]
    users = model.user_vectors(torch.arange(5))
    users = users.double() if double else users
    boost = torch.randn(40, dtype=torch.float64) if boosted else None
    if boost is not None:
        boost[30:] = boost[:10]
    candidates = torch.stack([torch.randperm(40)[:width] for _ in range(5)])
    candidates[torch.arange(width) >= torch.randint(width + 1, (5, 1))] = PAD
    compiled, in_torch = ExactRanker(model), ExactRanker(model, compiled=False)
    ranked = compiled.bind(users, boost).rank(candidates, k)
    assert ranked.equal(in_torch.bind(users, boost).rank(candidates, k))
    for user in range(5):
        own = slice(user, user + 1)
        assert compiled.bind(users[own], boost).rank(candidates[own], k).equal(ranked[own])


def test_without_compiled_code_lists_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 10)
    users = model.user_vectors(torch.arange(3))
    candidates = torch.arange(10).expand(3, -1)
    expected = ExactRanker(model).rank(users, candidates, 5)
    monkeypatch.setattr(numba_ranker, "numba_kernel", lambda _: None)
    ranker = ExactRanker(model)
    assert isinstance(ranker.backend, TorchRanker)
    assert ranker.rank(users, candidates, 5).equal(expected)


@pytest.mark.slow
def test_a_full_disk_costs_no_compiled_code(tmp_path: Path) -> None:
    """numba keeps its code on disk; where it cannot, it compiles for this process alone."""
    script = """
import numba.core.caching as caching

def full(self, *args):
    raise OSError(28, "No space left on device")

caching.IndexDataCacheFile.save = full

import torch
from ncr_core.models import ModelConfig, build_model
from ncr_core.ranking import ExactRanker

model = build_model(ModelConfig(kind="dncr", factors=2), 3, 10).requires_grad_(False)
ranker = ExactRanker(model)
assert type(ranker.backend).__name__ == "NumbaRanker"
users, candidates = model.user_vectors(torch.arange(3)), torch.arange(10).expand(3, -1)
expected = ExactRanker(model, compiled=False).rank(users, candidates, 5)
assert ranker.rank(users, candidates, 5).equal(expected)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        # Compiled in a hurry: nobody waits for what it does.
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_lists_too_long_for_its_memory_are_ranked_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 10)
    ranker = ExactRanker(model)
    users = model.user_vectors(torch.arange(3))
    candidates = torch.arange(10).expand(3, -1)
    backend = ranker.backend
    assert isinstance(backend, NumbaRanker)
    monkeypatch.setattr(backend, "bind", lambda _: pytest.fail("the compiled code was called"))
    monkeypatch.setattr(numba_ranker, "MAX_COLUMNS", 10 * 8 - 1)  # one below what it takes
    assert not backend.supports(3, 10)
    expected = ExactRanker(model, compiled=False).rank(users, candidates, 5)
    assert ranker.rank(users, candidates, 5).equal(expected)
    monkeypatch.setattr(numba_ranker, "MAX_COLUMNS", 10 * 8)
    assert backend.supports(3, 10)


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


HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


def ranked(
    model: PairwiseRanker, users: torch.Tensor, candidates: torch.Tensor, k: int
) -> torch.Tensor:
    ranker = ExactRanker(model.to(DEVICE), compiled=False)
    users, candidates = users.to(DEVICE), candidates.to(DEVICE)
    best, pairs = TritonRanker(ranker.margins).bind(ranker.margins.bind(users)).rank(candidates, k)
    assert ((pairs > 0).cpu() == ((candidates != PAD).sum(dim=1) > 1).cpu()).all()
    return best.cpu()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("kind", "layers", "activation", "scale"),
    [
        ("neupr", 4, "tanh", 1.0),
        ("neupr", 3, "relu", 1.0),
        ("dncr", 2, "tanh", 1.0),
        ("dncr", 3, "relu", 8.0),
        ("neupr", 3, "tanh", 1e-3),
    ],
)
def test_it_equals_the_scan_in_torch(
    kind: Literal["neupr", "dncr"],
    layers: int,
    activation: Literal["tanh", "relu"],
    scale: float,
) -> None:
    """Ragged lists, a list of one and of none, twins that tie, and weights of any size."""
    model = wild_model(
        ModelConfig(kind=kind, factors=3, layers=layers, activation=activation), 5, 60
    )
    with torch.no_grad():
        for name, table in model.named_parameters():
            table *= scale
            if name.startswith("items"):
                table[50:] = table[:10]
    users = model.user_vectors(torch.arange(5))
    candidates = torch.stack([torch.randperm(60)[:45] for _ in range(5)])
    candidates[1, 20:], candidates[2, 1:], candidates[3, :] = PAD, PAD, PAD
    for k in (1, 8, 45):
        expected = ExactRanker(model, compiled=False).rank(users, candidates, k).cpu()
        assert ranked(model, users, candidates, k).equal(expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="towers"):
        TritonRanker(ExactRanker(wild_model(ModelConfig(kind="nbpr", factors=2), 3, 9)).margins)
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 9)
    if not HAS_GPU:
        assert triton_ranker(ExactRanker(model).margins) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(not HAS_GPU, reason="no GPU that torch can use")
def test_a_ranker_on_a_gpu_uses_it_and_agrees_with_the_cpu() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=8, layers=4), 300, 2_000)
    users = model.user_vectors(torch.arange(300))
    candidates = torch.stack([torch.randperm(2_000)[:1_000] for _ in range(300)])
    expected = ExactRanker(model).rank(users, candidates, 10)
    ranker = ExactRanker(model.cuda())
    assert isinstance(ranker.backend, TritonRanker)
    assert ranker.rank(users, candidates, 10).cpu().equal(expected)
