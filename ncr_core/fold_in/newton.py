"""The fit of a vector by Newton steps, for any margins that give their gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ncr_core.fold_in.prior import Prior

Floats = npt.NDArray[np.float64]

Margins = Callable[[Floats], tuple[Floats, Floats]]
"""(E,) a vector → (P,) half margins of its pairs, and (P, E) their gradients."""

SHORTER, SHORTEST = 0.3, 1e-3  # of a step that made it worse, and when to give up


def newton(margins: Margins, weights: Floats, prior: Prior, steps: int, least: float) -> Floats:
    """The vector (E,) that makes Σ w·softplus(−m) least, less its log-probability by the prior.

    Gauss-Newton: the curvature of softplus is taken, that of the margins is not, so that a step
    always leads down; one that is too long is shortened. At most ``steps`` looks at the margins;
    stops when a step promises less than ``least``. What `kernel.fit` does in compiled code.
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
            size *= SHORTER
        if size < SHORTEST or not np.isfinite(best):
            break
        tried = v + size * step
    vector: Floats = prior.mean + basis @ v
    return vector
