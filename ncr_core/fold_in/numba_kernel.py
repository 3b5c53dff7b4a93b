"""The fit of one user's vector as compiled code: Newton steps on the pairs, without autograd.

The kernel computes ``LANES`` pairs at once, in both orders, feature by feature, forward and then
backward. The gradient of a margin flows through the first layer's inputs alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ncr_core.ranking.backends.dense_kernel import (
    BOTH,
    LANES,
    RELU,
    TANH,
    activate,
    compiled_fast,
    dense,
)

HALF = np.float32(0.5)  # of a type that makes no float32 a float64
STEP_DECAY = 0.3  # of the length of a step that made the loss larger
MIN_STEP = 1e-3  # of a full step: what is shorter ends the fit


@compiled_fast
def _times_slope(y: Any, d: Any, n: int, kind: int) -> None:
    """Multiplies d by the slope of the activation, computed from its output y."""
    if kind == RELU:
        for o in range(n):
            for lane in range(BOTH):
                if y[o, lane] <= 0:
                    d[o, lane] = 0
        return
    for o in range(n):
        for lane in range(BOTH):
            d[o, lane] -= d[o, lane] * y[o, lane] * y[o, lane]


@compiled_fast
def _first_inputs(
    winners: Any, losers: Any, at: int, count: int, t: Any, tables: Any, x: Any, q: Any, half: Any
) -> None:
    """Fills x (h, BOTH), q (LANES, n) and half (LANES,) for ``count`` pairs from ``at`` on.

    x are the inputs of the first activation. q are the slopes of the half margin in the linear part
    of t. ``half`` is the linear part of the half margin. Lanes beyond ``count`` repeat the last
    pair.
    """
    linear, bias, first, second = tables
    n_linear, h = linear.shape[1], first.shape[1]
    for lane in range(LANES):
        p = at + min(lane, count - 1)
        i, j = winners[p], losers[p]
        total = HALF * (bias[i] - bias[j]) if len(bias) else t[0] * 0
        for f in range(n_linear):
            slope = HALF * (linear[i, f] - linear[j, f])
            q[lane, f] = slope
            total += t[f] * slope
        half[lane] = total
        for f in range(h):
            c = t[n_linear + f]
            x[f, lane] = c + first[i, f] + second[j, f]
            x[f, LANES + lane] = c + first[j, f] + second[i, f]


@compiled_fast
def _through_tower(
    tower: Any, kind: int, outputs: Any, slopes: Any, half: Any, no_bias: Any
) -> None:
    """Forward from outputs[0]: half (LANES,) += half the tower's margin; and backward.

    slopes[0] (h, BOTH) ← slopes of each order's logit in C_u. ``no_bias`` holds zeros.
    """
    widths, weights, transposed, biases, last = tower
    n_layers = len(widths) - 1
    activate(outputs[0], widths[0], kind)
    w_at, b_at = 0, 0
    for layer in range(n_layers):
        n_in, n_out = widths[layer], widths[layer + 1]
        y = outputs[layer + 1]
        matrix = weights[w_at : w_at + n_in * n_out].reshape(n_out, n_in)
        dense(matrix, biases[b_at : b_at + n_out], outputs[layer], y, n_in, n_out)
        activate(y, n_out, kind)
        w_at += n_in * n_out
        b_at += n_out
    top, d = outputs[n_layers], slopes[n_layers]
    for o in range(widths[n_layers]):
        for lane in range(LANES):
            half[lane] += HALF * last[o] * (top[o, lane] - top[o, LANES + lane])
        for lane in range(BOTH):
            d[o, lane] = last[o]
    _times_slope(top, d, widths[n_layers], kind)
    for layer in range(n_layers - 1, -1, -1):
        n_in, n_out = widths[layer], widths[layer + 1]
        w_at -= n_in * n_out
        below = slopes[layer]
        matrix = transposed[w_at : w_at + n_in * n_out].reshape(n_in, n_out)
        dense(matrix, no_bias, slopes[layer + 1], below, n_out, n_in)
        _times_slope(outputs[layer], below, n_in, kind)


@compiled_fast
def loss_of_pairs(
    pairs: Any, t: Any, tables: Any, tower: Any, kind: int, work: Any, gradient: Any, curvature: Any
) -> Any:
    """Σ w·softplus(−m) over pairs (winners, losers, w), with m the half margin.

    Fills the gradient (n,) of the loss in t, and the Gauss-Newton curvature (n, n). The curvature
    is Σ w·σ(m)·σ(−m)·qqᵀ with q the gradient of m.
    """
    winners, losers, weights = pairs
    outputs, slopes, q, half, no_bias = work
    n, n_linear = len(t), tables[0].shape[1]
    gradient[:] = 0
    curvature[:] = 0
    loss = 0.0
    for at in range(0, len(winners), LANES):
        count = min(LANES, len(winners) - at)
        _first_inputs(winners, losers, at, count, t, tables, outputs[0], q, half)
        if n > n_linear:
            _through_tower(tower, kind, outputs, slopes, half, no_bias)
            d = slopes[0]
            for f in range(n - n_linear):
                for lane in range(LANES):
                    q[lane, n_linear + f] = HALF * (d[f, lane] - d[f, LANES + lane])
        for lane in range(LANES):
            m, weight = np.float64(half[lane]), 0.0
            if lane < count:
                weight = weights[at + lane]
            wrong = 1.0 / (1.0 + np.exp(m))
            loss += weight * (np.log1p(np.exp(-abs(m))) + max(-m, 0.0))
            for f in range(n):
                gradient[f] -= weight * wrong * q[lane, f]
            half[lane] = weight * wrong * (1.0 - wrong)
        for lane in range(0, LANES, 4):
            q0, q1, q2, q3 = q[lane], q[lane + 1], q[lane + 2], q[lane + 3]
            for a in range(n):
                e0, e1 = half[lane] * q0[a], half[lane + 1] * q1[a]
                e2, e3 = half[lane + 2] * q2[a], half[lane + 3] * q3[a]
                row = curvature[a]
                for b in range(n):
                    row[b] += e0 * q0[b] + e1 * q1[b] + e2 * q2[b] + e3 * q3[b]
    return loss


@compiled_fast
def _solve(matrix: Any, right: Any, x: Any) -> None:
    """Solves matrix·x = right for x by Cholesky's method, which overwrites the matrix.

    The matrix is symmetric and has no negative eigenvalues.
    """
    n = len(right)
    for a in range(n):
        for b in range(a + 1):
            total = matrix[a, b]
            for k in range(b):
                total -= matrix[a, k] * matrix[b, k]
            matrix[a, b] = np.sqrt(max(total, 1e-12)) if a == b else total / matrix[b, b]
    for a in range(n):
        total = right[a]
        for k in range(a):
            total -= matrix[a, k] * x[k]
        x[a] = total / matrix[a, a]
    for a in range(n - 1, -1, -1):
        total = x[a]
        for k in range(a + 1, n):
            total -= matrix[k, a] * x[k]
        x[a] = total / matrix[a, a]


@compiled_fast
def _newton_step(basis: Any, gradient: Any, curvature: Any, v: Any, step: Any) -> Any:
    """Fills ``step`` for the loss in t = t₀ + basis·v; returns the promised decrease.

    The loss includes |v|²/2.
    """
    n, r = basis.shape
    slope, system, half_way = np.empty(r), np.zeros((r, r)), np.zeros((n, r))
    for b in range(r):
        slope[b] = v[b]
        system[b, b] = 1.0
    for a in range(n):
        for k in range(n):
            c = np.float64(curvature[a, k])
            for b in range(r):
                half_way[a, b] += c * basis[k, b]
    for a in range(n):
        for b in range(r):
            of_b = basis[a, b]
            slope[b] += of_b * gradient[a]
            for k in range(r):
                system[b, k] += of_b * half_way[a, k]
    _solve(system, slope, step)
    promised = 0.0
    for b in range(r):
        promised += slope[b] * step[b] / 2
        step[b] = -step[b]
    return promised


@compiled_fast
def fit(
    pairs: Any, start: Any, basis: Any, tables: Any, tower: Any, kind: int, steps: int, least: float
) -> Any:
    """The v (r,) that minimises Σ w·softplus(−m) + |v|²/2, where t = start + basis·v.

    ``start`` (n,) and ``basis`` (n, r) are the prior's mean and basis, mapped to t. The fit makes
    at most ``steps`` passes over the pairs. The fit stops when a step promises a decrease of less
    than ``least`` nats.
    """
    n, r = basis.shape
    widths, kind_of = tower[0], tables[0].dtype
    work = (
        np.empty((len(widths), max(1, widths.max()), BOTH), kind_of),
        np.empty((len(widths), max(1, widths.max()), BOTH), kind_of),
        np.empty((LANES, n), kind_of),
        np.empty(LANES, kind_of),
        np.zeros(max(1, widths.max()), kind_of),
    )
    t, gradient, curvature = np.empty(n, kind_of), np.empty(n), np.empty((n, n), kind_of)
    v, tried, step = np.zeros(r), np.zeros(r), np.zeros(r)
    best, size = np.inf, 1.0
    for _ in range(steps):
        for a in range(n):
            total = start[a]
            for b in range(r):
                total += basis[a, b] * tried[b]
            t[a] = total
        loss = loss_of_pairs(pairs, t, tables, tower, kind, work, gradient, curvature)
        for b in range(r):
            loss += tried[b] * tried[b] / 2
        if loss <= best + 1e-9:
            for b in range(r):  # to numba, loops are seconds quicker to compile than whole arrays
                v[b] = tried[b]
            best, size = loss, 1.0
            if _newton_step(basis, gradient, curvature, v, step) < least:
                for b in range(r):
                    v[b] += step[b]
                break
        elif np.isfinite(best):
            size *= STEP_DECAY
        if size < MIN_STEP or not np.isfinite(best):
            break
        for b in range(r):
            tried[b] = v[b] + size * step[b]
    return v


def compile_all() -> None:
    """Compiles ``fit`` for the types of its calls."""
    rows, table = np.zeros(1, dtype=np.int64), np.zeros((1, 4), dtype=np.float32)
    nothing, square = table[0, :0], np.zeros((8, 2))
    tower = (np.array([4]), nothing, nothing, nothing, table[0])
    tables = (table, nothing, table, table)
    fit((rows, rows, np.ones(1)), square[:, 0].copy(), square, tables, tower, TANH, 1, 1.0)
