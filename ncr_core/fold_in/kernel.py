"""The fit of one user's vector as compiled code: Newton steps on the pairs, without autograd.

Pairs are computed ``LANES`` at once, in both orders, feature by feature, as the ranker's kernel
does it, forward and then backward: the gradient of a margin flows through the first layer's inputs
alone. numba looks for changes only in the file of the function that is called, so all of it is
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core.caching import NullCache

RELU, TANH, EXACT_TANH = 0, 1, 2
HALF = np.float32(0.5)  # of a type that makes no float32 a float64
LANES = 16
BOTH = 2 * LANES  # the lanes of (i, j), then those of (j, i)
SHORTER, SHORTEST = 0.3, 1e-3  # of a step that made it worse, and when to give up

F = TypeVar("F", bound=Callable[..., Any])


def _fast(function: F) -> F:
    """As machine code that leaves other threads alone. The order of a sum may change, and products
    be fused with sums; infinities and NaN stay."""
    fastmath = {"contract", "reassoc", "arcp", "nsz"}
    try:
        made = njit(nogil=True, error_model="numpy", cache=True, fastmath=fastmath)(function)
    except RuntimeError:  # no folder to keep the code in
        made = njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    return cast(F, made)


@_fast
def _add_product(matrix: Any, x: Any, y: Any) -> None:
    """y += matrix·x: (n_out, n_in), x (n_in, BOTH), y (n_out, BOTH); sizes are multiples of 4."""
    n_out, n_in = matrix.shape
    for o in range(0, n_out, 4):
        for f in range(0, n_in, 4):
            a0, a1, a2, a3 = matrix[o, f], matrix[o, f + 1], matrix[o, f + 2], matrix[o, f + 3]
            b0, b1 = matrix[o + 1, f], matrix[o + 1, f + 1]
            b2, b3 = matrix[o + 1, f + 2], matrix[o + 1, f + 3]
            c0, c1 = matrix[o + 2, f], matrix[o + 2, f + 1]
            c2, c3 = matrix[o + 2, f + 2], matrix[o + 2, f + 3]
            d0, d1 = matrix[o + 3, f], matrix[o + 3, f + 1]
            d2, d3 = matrix[o + 3, f + 2], matrix[o + 3, f + 3]
            for lane in range(BOTH):
                x0, x1, x2, x3 = x[f, lane], x[f + 1, lane], x[f + 2, lane], x[f + 3, lane]
                y[o, lane] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                y[o + 1, lane] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                y[o + 2, lane] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                y[o + 3, lane] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@_fast
def _activate(y: Any, n: int, kind: int) -> None:
    """ReLU, tanh, or tanh as the quotient of polynomials that Eigen uses: within 4e-7."""
    if kind == RELU:
        for o in range(n):
            for lane in range(BOTH):
                y[o, lane] = max(y[o, lane], 0)
        return
    if kind == EXACT_TANH:
        for o in range(n):
            for lane in range(BOTH):
                y[o, lane] = np.tanh(y[o, lane])
        return
    limit = np.float32(7.90531110763549805)
    for o in range(n):
        for lane in range(BOTH):
            x = min(max(y[o, lane], -limit), limit)
            s = x * x
            p = s * np.float32(-2.76076847742355e-16) + np.float32(2.00018790482477e-13)
            p = s * p + np.float32(-8.60467152213735e-11)
            p = s * p + np.float32(5.12229709037114e-08)
            p = s * p + np.float32(1.48572235717979e-05)
            p = s * p + np.float32(6.37261928875436e-04)
            p = s * p + np.float32(4.89352455891786e-03)
            q = s * np.float32(1.19825839466702e-06) + np.float32(1.18534705686654e-04)
            q = s * q + np.float32(2.26843463243900e-03)
            q = s * q + np.float32(4.89352518554385e-03)
            y[o, lane] = x * p / q


@_fast
def _times_slope(y: Any, d: Any, n: int, kind: int) -> None:
    """d ← d times the slope of the activation, by what it gave: y."""
    if kind == RELU:
        for o in range(n):
            for lane in range(BOTH):
                if y[o, lane] <= 0:
                    d[o, lane] = 0
        return
    for o in range(n):
        for lane in range(BOTH):
            d[o, lane] -= d[o, lane] * y[o, lane] * y[o, lane]


@_fast
def _first_inputs(
    winners: Any, losers: Any, at: int, count: int, t: Any, tables: Any, x: Any, q: Any, half: Any
) -> None:
    """Of ``count`` pairs from ``at`` on: x (h, BOTH) ← inputs of the first activation, q
    (LANES, n) ← slopes of the half margin in s_u, half (LANES,) ← the half margin's linear part.
    Lanes that are left over repeat the last pair."""
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


@_fast
def _through_tower(tower: Any, kind: int, outputs: Any, slopes: Any, half: Any) -> None:
    """From the inputs in outputs[0] up: half (LANES,) += half the tower's margin; and down again:
    slopes[0] (h, BOTH) ← of either order's logit in C_u."""
    widths, weights, transposed, biases, last = tower
    n_layers = len(widths) - 1
    _activate(outputs[0], widths[0], kind)
    w_at, b_at = 0, 0
    for layer in range(n_layers):
        n_in, n_out = widths[layer], widths[layer + 1]
        y = outputs[layer + 1]
        for o in range(n_out):
            for lane in range(BOTH):
                y[o, lane] = biases[b_at + o]
        matrix = weights[w_at : w_at + n_in * n_out].reshape(n_out, n_in)
        _add_product(matrix, outputs[layer], y)
        _activate(y, n_out, kind)
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
        below[:n_in] = 0
        matrix = transposed[w_at : w_at + n_in * n_out].reshape(n_in, n_out)
        _add_product(matrix, slopes[layer + 1], below)
        _times_slope(outputs[layer], below, n_in, kind)


@_fast
def loss_of_pairs(
    pairs: Any, t: Any, tables: Any, tower: Any, kind: int, work: Any, gradient: Any, curvature: Any
) -> Any:
    """Σ w·softplus(−m) over pairs (winners, losers, w), with m half the margin; its gradient (n,)
    in t, and the Gauss-Newton curvature (n, n) Σ w·σ(m)·σ(−m)·qqᵀ with q the gradient of m."""
    winners, losers, weights = pairs
    outputs, slopes, q, half = work
    n, n_linear = len(t), tables[0].shape[1]
    gradient[:] = 0
    curvature[:] = 0
    loss = 0.0
    for at in range(0, len(winners), LANES):
        count = min(LANES, len(winners) - at)
        _first_inputs(winners, losers, at, count, t, tables, outputs[0], q, half)
        if n > n_linear:
            _through_tower(tower, kind, outputs, slopes, half)
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


@_fast
def _solve(matrix: Any, right: Any, x: Any) -> None:
    """x with matrix·x = right, for a symmetric matrix without negative eigenvalues, by Cholesky,
    which replaces the matrix."""
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


@_fast
def _newton_step(basis: Any, gradient: Any, curvature: Any, v: Any, step: Any) -> Any:
    """step ← of v, for the loss in t = t₀ + basis·v plus |v|²/2; what it promises of the loss."""
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


@_fast
def fit(
    pairs: Any, start: Any, basis: Any, tables: Any, tower: Any, kind: int, steps: int, least: float
) -> Any:
    """The v (r,) that makes Σ w·softplus(−m) + |v|²/2 least, where t = start + basis·v.

    ``start`` (n,) and ``basis`` (n, r) are of what the tables see of the user's vector. At most
    ``steps`` passes over the pairs; stops when a step promises less than ``least``.
    """
    n, r = basis.shape
    widths, kind_of = tower[0], tables[0].dtype
    work = (
        np.empty((len(widths), max(1, widths.max()), BOTH), kind_of),
        np.empty((len(widths), max(1, widths.max()), BOTH), kind_of),
        np.empty((LANES, n), kind_of),
        np.empty(LANES, kind_of),
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
            v[:] = tried
            best, size = loss, 1.0
            if _newton_step(basis, gradient, curvature, v, step) < least:
                v += step
                break
        elif np.isfinite(best):
            size *= SHORTER
        if size < SHORTEST or not np.isfinite(best):
            break
        tried[:] = v + size * step
    return v


def keep_nothing() -> None:
    """Compiles anew from here on, without the code on disk."""
    every: list[Any] = [_add_product, _activate, _times_slope, _first_inputs, _through_tower]
    every += [loss_of_pairs, _solve, _newton_step, fit]
    for function in every:
        function._cache = NullCache()


def try_out() -> None:
    """Compiles for the types that it is called with."""
    rows, table = np.zeros(1, dtype=np.int64), np.zeros((1, 4), dtype=np.float32)
    nothing, square = table[0, :0], np.zeros((8, 2))
    tower = (np.array([4]), nothing, nothing, nothing, table[0])
    tables = (table, nothing, table, table)
    fit((rows, rows, np.ones(1)), square[:, 0].copy(), square, tables, tower, TANH, 1, 1.0)
