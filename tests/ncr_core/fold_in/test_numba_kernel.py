"""The compiled fit: its gradients are autograd's, its vectors are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ncr_core.fold_in import numba_kernel
from ncr_core.fold_in.users import FitArrays, fit_arrays, fit_kernel
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.ranking.backends import dense_kernel
from tests.ncr_core.conftest import CONFIGS, config_name, wild_model

COMPILED = [c for c in CONFIGS if c.kind != "twotower" and not c.shared_embeddings]
N = 37


def test_it_is_used_where_tests_are_run() -> None:
    assert fit_kernel() is numba_kernel


def arrays_of(model: PairwiseRanker, dtype: torch.dtype) -> FitArrays:
    size = model.user_vectors(torch.tensor([0])).shape[1]
    found = fit_arrays(model.tables().to(dtype), size, dtype)
    assert found is not None
    return found


def loss_and_slopes(
    model: PairwiseRanker, vector: Tensor, pairs: tuple[np.ndarray, ...], dtype: torch.dtype
) -> tuple[float, np.ndarray, np.ndarray]:
    """By the kernel: the loss, its gradient and its curvature in the user's vector."""
    arrays = arrays_of(model, dtype)
    t = (arrays.to_tables @ vector.numpy() + arrays.offset).astype(arrays.tables[0].dtype)
    n, widths = len(t), arrays.tower[0]
    kind = dense_kernel.RELU
    if model.config.activation == "tanh":
        kind = dense_kernel.EXACT_TANH if dtype == torch.float64 else dense_kernel.TANH
    shape = (len(widths), max(1, widths.max()), dense_kernel.BOTH)
    work = (
        np.empty(shape, t.dtype),
        np.empty(shape, t.dtype),
        np.empty((dense_kernel.LANES, n), t.dtype),
        np.empty(dense_kernel.LANES, t.dtype),
        np.zeros(shape[1], t.dtype),
    )
    gradient, curvature = np.empty(n), np.empty((n, n), t.dtype)
    loss = numba_kernel.loss_of_pairs(
        pairs, t, arrays.tables, arrays.tower, kind, work, gradient, curvature
    )
    to_tables = arrays.to_tables
    return loss, to_tables.T @ gradient, to_tables.T @ curvature @ to_tables


@pytest.mark.parametrize("config", COMPILED, ids=config_name)
@pytest.mark.parametrize("count", [1, 16, 53])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-4),
        pytest.param(torch.float64, 1e-10, marks=pytest.mark.slow),  # compiled for tests alone
    ],
)
def test_gradients_are_autograds(
    config: ModelConfig, count: int, dtype: torch.dtype, tolerance: float
) -> None:
    model = wild_model(config, 3, N).double()
    rng = np.random.default_rng(count)
    i = rng.integers(N, size=count)
    j = (i + rng.integers(1, N, size=count)) % N
    weights = rng.uniform(0.1, 2.0, size=count)
    vector = model.user_vectors(torch.tensor([1]))[0]

    users = vector.expand(count, -1).clone().requires_grad_(True)
    first, second = torch.from_numpy(i), torch.from_numpy(j)
    m = (model.logits(users, first, second) - model.logits(users, second, first)) / 2
    w = torch.from_numpy(weights)
    expected = float((w * softplus(-m)).sum().detach())
    (q,) = torch.autograd.grad(m.sum(), users)
    m = m.detach()
    gradient = -(q * (w * torch.sigmoid(-m)).unsqueeze(1)).sum(0)
    curvature = (q * (w * torch.sigmoid(m) * torch.sigmoid(-m)).unsqueeze(1)).T @ q

    found = loss_and_slopes(model, vector, (i, j, weights), dtype)
    size = max(1.0, expected)
    assert found[0] == pytest.approx(expected, abs=tolerance * size)
    np.testing.assert_allclose(found[1], gradient, atol=tolerance * 10 * size)
    np.testing.assert_allclose(found[2], curvature, atol=tolerance * 100 * size)


@pytest.mark.slow
def test_the_fit_is_where_the_loss_is_least() -> None:
    """For a model whose loss is convex: the slope there is none, as by differences."""
    model = wild_model(ModelConfig(kind="nbpr", factors=4, item_bias=True), 3, N)
    arrays = arrays_of(model, torch.float64)
    rng = np.random.default_rng(0)
    i = rng.integers(N, size=40)
    pairs = (i, (i + 1 + rng.integers(N - 1, size=40)) % N, rng.uniform(0.1, 1.0, size=40))
    start, basis = arrays.offset + 0.3, np.ascontiguousarray(arrays.to_tables[:, :3])
    v = numba_kernel.fit(
        pairs, start, basis, arrays.tables, arrays.tower, dense_kernel.RELU, 50, 1e-14
    )

    def loss(at: np.ndarray) -> float:
        t = start + basis @ at
        linear, bias = arrays.tables[:2]
        half = (linear[pairs[0]] - linear[pairs[1]]) @ t + bias[pairs[0]] - bias[pairs[1]]
        return float(pairs[2] @ np.logaddexp(0.0, -half / 2) + at @ at / 2)

    for direction in np.eye(3):
        slope = (loss(v + 1e-5 * direction) - loss(v - 1e-5 * direction)) / 2e-5
        assert slope == pytest.approx(0.0, abs=1e-6)
    assert loss(v) < loss(np.zeros(3)) - 0.1


def test_what_the_kernel_is_not_made_for() -> None:
    for config in CONFIGS:
        tables = wild_model(config, 3, N).tables()
        other = config.kind == "twotower" or (config.shared_embeddings and config.layers > 1)
        size = 4 * config.tower_embedding
        assert (fit_arrays(tables, size, torch.float32) is None) == other
