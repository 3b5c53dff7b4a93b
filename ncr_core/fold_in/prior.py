"""The most probable vector: a Gaussian prior from trained vectors, and the fit by Newton steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.errors import DataError

Floats = npt.NDArray[np.float64]

HalfMargins = Callable[[Floats], tuple[Floats, Floats]]
"""(E,) a vector → (P,) half margins of its pairs, and (P, E) their gradients."""

MAX_CELLS = 2**22  # of vectors at once: 32 MiB
MAX_DIRECTIONS = 64  # a step solves that many equations
MIN_VARIANCE = 1e-6  # of the mean variance: a direction in which nothing varies
STEP_DECAY = 0.3  # of the length of a step that made the loss larger
MIN_STEP = 1e-3  # of a full step: what is shorter ends the fit


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """N(mean, basis·basisᵀ): a vector is mean + basis·v with v ~ N(0, 1)."""

    mean: Floats
    """(E,)"""
    basis: Floats
    """(E, r) the principal directions, each as long as its standard deviation."""


def prior_of(n: int, rows: Callable[[Tensor], Tensor]) -> Prior:
    """The mean and the principal directions of n vectors, which ``rows`` gives by their numbers.

    The computation takes one pass, and copies only a part of the vectors at once. A prior of wide
    vectors has the ``MAX_DIRECTIONS`` directions with the most variance.
    """
    total, squares = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        # Around one of them, so that nothing is lost to a mean that is far from 0.
        first = rows(torch.zeros(1, dtype=torch.long))[0].double().cpu()
        n_rows = max(1, MAX_CELLS // max(1, len(first)))
        for start in range(0, n, n_rows):
            part = rows(torch.arange(start, min(n, start + n_rows))).double().cpu() - first
            total = total + part.sum(0)
            squares = squares + part.T @ part
    mean = total / n
    covariance = (squares / n - torch.outer(mean, mean)).numpy()
    return Prior((first + mean).numpy(), basis_of(covariance))


def basis_of(covariance: Floats) -> Floats:
    """(E, E) covariance → (E, r) the principal directions with the most variance.

    There are at most ``MAX_DIRECTIONS``. Each direction is as long as its standard deviation.
    """
    values, directions = np.linalg.eigh(covariance)
    values = np.maximum(values, MIN_VARIANCE * max(float(values.mean()), 0.0))
    largest = values.argsort()[::-1][:MAX_DIRECTIONS]
    basis = directions[:, largest] * np.sqrt(values[largest])
    return np.ascontiguousarray(basis)


def known_priors(priors: Tensor | None, shape: tuple[int, ...]) -> list[Floats | None]:
    """The rows of (m, F) priors; None for a row of NaN, and for every row without ``priors``.

    Raises DataError for another shape, and for rows of which a part is not finite.
    """
    if priors is None:
        return [None] * shape[0]
    if tuple(priors.shape) != tuple(shape):
        raise DataError(f"priors must be of shape {tuple(shape)}, not {tuple(priors.shape)}")
    rows = priors.detach().double().cpu().numpy()
    missing = np.isnan(rows).all(axis=1)
    if not np.isfinite(rows[~missing]).all():
        raise DataError("a prior must be finite, or NaN as a whole")
    return [None if is_missing else row for row, is_missing in zip(rows, missing, strict=True)]


def newton(margins: HalfMargins, weights: Floats, prior: Prior, steps: int, least: float) -> Floats:
    """The vector (E,) with the least Σ w·softplus(−m) minus its log-probability by the prior.

    The method is Gauss-Newton. The Hessian includes the curvature of softplus but not the curvature
    of the margins, so that each step leads downhill. A step that is too long is shortened. The fit
    computes the margins at most ``steps`` times. The fit stops when a step promises a decrease of
    less than ``least`` nats. ``numba_kernel.fit`` is the same in compiled code.
    """
    basis = prior.basis
    v: Floats = np.zeros(basis.shape[1])
    step: Floats = v
    tried: Floats = v
    best, size = np.inf, 1.0
    for _ in range(steps):
        half, gradients = margins(prior.mean + basis @ tried)
        loss = float(weights @ np.logaddexp(0.0, -half) + tried @ tried / 2)
        if loss <= best + 1e-9:
            v, best, size = tried, loss, 1.0
            slopes = gradients @ basis
            wrong = 1.0 / (1.0 + np.exp(np.minimum(half, 700.0)))
            slope = v - slopes.T @ (weights * wrong)
            curvature = (slopes * (weights * wrong * (1.0 - wrong))[:, None]).T @ slopes
            step = -np.asarray(np.linalg.solve(curvature + np.eye(len(v)), slope), np.float64)
            if -(slope @ step) / 2 < least:
                v = v + step
                break
        elif np.isfinite(best):
            size *= STEP_DECAY
        if size < MIN_STEP or not np.isfinite(best):
            break
        tried = v + size * step
    vector: Floats = prior.mean + basis @ v
    return vector
