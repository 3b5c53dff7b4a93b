"""The shared parts of the numba kernels: compilation, a dense layer and the activations.

The kernels compute ``LANES`` pairs of items at once, each in both orders, feature by feature, so
that every loop runs over neighbouring numbers and becomes vector instructions.

numba keeps compiled code on disk, and checks only the file of the called function for changes.
``compiled`` and ``compiled_fast`` also compile a function anew when this file changes. Kernels must
not call compiled functions of any other file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

RELU, TANH, EXACT_TANH, TANH_BY_EXPONENTIALS = 0, 1, 2, 3
LANES = 16
BOTH = 2 * LANES  # the lanes of (i, j), then those of (j, i)

F = TypeVar("F", bound=Callable[..., Any])


def _jit(function: F, **options: Any) -> F:
    try:
        dispatcher = njit(nogil=True, error_model="numpy", cache=True, **options)(function)
        index = dispatcher._cache._cache_file
        source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        index._source_stamp = (index._source_stamp, source)
    except (AttributeError, OSError, RuntimeError):  # no folder to keep the code in
        dispatcher = njit(nogil=True, error_model="numpy", **options)(function)
    return cast(F, dispatcher)


def compiled(function: F) -> F:
    """Machine code that releases Python's lock, with exact IEEE arithmetic in the written order."""
    return _jit(function)


def compiled_fast(function: F) -> F:
    """As ``compiled``, but sums may be reordered and fused; infinities and NaN stay."""
    return _jit(function, fastmath={"contract", "reassoc", "arcp", "nsz"})


@compiled_fast
def dense(weights: Any, biases: Any, x: Any, y: Any, n_in: int, n_out: int) -> None:
    """Fills y = W x + b: (n_out, n_in) weights, x (n_in, BOTH), y (n_out, BOTH).

    n_in and n_out are multiples of 4.
    """
    for o in range(0, n_out, 4):
        for lane in range(BOTH):
            y[o, lane] = biases[o]
            y[o + 1, lane] = biases[o + 1]
            y[o + 2, lane] = biases[o + 2]
            y[o + 3, lane] = biases[o + 3]
        for f in range(0, n_in, 4):
            a0, a1, a2, a3 = weights[o, f], weights[o, f + 1], weights[o, f + 2], weights[o, f + 3]
            b0, b1 = weights[o + 1, f], weights[o + 1, f + 1]
            b2, b3 = weights[o + 1, f + 2], weights[o + 1, f + 3]
            c0, c1 = weights[o + 2, f], weights[o + 2, f + 1]
            c2, c3 = weights[o + 2, f + 2], weights[o + 2, f + 3]
            d0, d1 = weights[o + 3, f], weights[o + 3, f + 1]
            d2, d3 = weights[o + 3, f + 2], weights[o + 3, f + 3]
            for lane in range(BOTH):
                x0, x1, x2, x3 = x[f, lane], x[f + 1, lane], x[f + 2, lane], x[f + 3, lane]
                y[o, lane] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                y[o + 1, lane] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                y[o + 2, lane] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                y[o + 3, lane] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@compiled_fast
def activate(y: Any, n_out: int, kind: int) -> None:
    """Applies ReLU or tanh to the first rows of y (≥ n_out, BOTH) in place.

    ``TANH`` is the quotient of polynomials that Eigen uses, within 4e-7 of tanh in float32.
    ``EXACT_TANH`` is the library's tanh.
    """
    if kind == RELU:
        for o in range(n_out):
            for lane in range(BOTH):
                y[o, lane] = max(y[o, lane], np.float32(0.0))
        return
    if kind == EXACT_TANH:
        for o in range(n_out):
            for lane in range(BOTH):
                y[o, lane] = np.tanh(y[o, lane])
        return
    limit = np.float32(7.90531110763549805)
    for o in range(n_out):
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
