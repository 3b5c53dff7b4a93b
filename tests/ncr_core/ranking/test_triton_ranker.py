"""The scan for GPUs: on one where there is one, else by Triton's interpreter where that is there.

`pip install triton` brings the interpreter to a machine without a GPU, as far as there is a wheel.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import pytest
import torch

from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking import PAD, ExactRanker
from ncr_core.ranking.backends.triton_ranker import TritonRanker, triton_ranker
from tests.ncr_core.conftest import wild_model

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
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


def test_what_it_is_not_for() -> None:
    with pytest.raises(ValueError, match="towers"):
        TritonRanker(ExactRanker(wild_model(ModelConfig(kind="nbpr", factors=2), 3, 9)).margins)
    model = wild_model(ModelConfig(kind="dncr", factors=2), 3, 9)
    if not HAS_GPU:
        assert triton_ranker(ExactRanker(model).margins) is None


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that torch can use")
def test_a_ranker_on_a_gpu_uses_it_and_agrees_with_the_cpu() -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=8, layers=4), 300, 2_000)
    users = model.user_vectors(torch.arange(300))
    candidates = torch.stack([torch.randperm(2_000)[:1_000] for _ in range(300)])
    expected = ExactRanker(model).rank(users, candidates, 10)
    ranker = ExactRanker(model.cuda())
    assert isinstance(ranker.backend, TritonRanker)
    assert ranker.rank(users, candidates, 10).cpu().equal(expected)
