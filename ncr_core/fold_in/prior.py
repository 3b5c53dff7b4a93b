"""Where vectors are expected to lie: around the mean of the trained ones, as they spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.float64]

CELLS_AT_ONCE = 2**22  # of vectors: 32 MiB
MOST_DIRECTIONS = 64  # a step solves that many equations
FLOOR = 1e-6  # of the mean variance: a direction in which nothing varies


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """N(mean, basis·basisᵀ): a vector is mean + basis·v with v ~ N(0, 1)."""

    mean: FloatArray
    """(E,)"""
    basis: FloatArray
    """(E, r) the principal directions, each as long as its standard deviation."""


def prior_of(n: int, rows: Callable[[Tensor], Tensor]) -> Prior:
    """The mean and the spread of n vectors, which ``rows`` gives by their numbers.

    In one pass and without a copy of all of them; of wide vectors the ``MOST_DIRECTIONS`` in which
    they vary most.
    """
    total, squares = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        # Around one of them, so that nothing is lost to a mean that is far from 0.
        first = rows(torch.zeros(1, dtype=torch.long))[0].double().cpu()
        at_once = max(1, CELLS_AT_ONCE // max(1, len(first)))
        for start in range(0, n, at_once):
            part = rows(torch.arange(start, min(n, start + at_once))).double().cpu() - first
            total = total + part.sum(0)
            squares = squares + part.T @ part
    mean = total / n
    covariance = (squares / n - torch.outer(mean, mean)).numpy()
    values, directions = np.linalg.eigh(covariance)
    values = np.maximum(values, FLOOR * max(float(values.mean()), 0.0))
    kept = values.argsort()[::-1][:MOST_DIRECTIONS]
    basis = directions[:, kept] * np.sqrt(values[kept])
    return Prior((first + mean).numpy(), np.ascontiguousarray(basis))
