"""The compiled code: loaded when it is first asked for, tried out, and done without if need be."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import numpy as np

from ncr_core.ranking.margins import TIES


@cache
def kernel_or_none() -> ModuleType | None:
    """The compiled code, tried out once; None, with a warning, where it cannot be had."""
    try:
        import numba

        from ncr_core.ranking import kernel, sort_kernel  # numba takes half a second to import
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _warn(error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # Python would take minutes
        return None
    try:
        _try_out(kernel)
        sort_kernel.try_out()
    except Exception:
        try:  # a full disk, or a damaged file of compiled code
            kernel.keep_nothing()
            sort_kernel.keep_nothing()
            _try_out(kernel)
            sort_kernel.try_out()
        except Exception as error:
            _warn(error)
            return None
    return kernel


def compiled_kernel() -> ModuleType:
    kernel = kernel_or_none()
    if kernel is None:
        raise RuntimeError("there is no compiled code here")
    return kernel


def compiled_sort() -> ModuleType | None:
    """The compiled code for products of vectors; None where there is none."""
    if kernel_or_none() is None:
        return None
    from ncr_core.ranking import sort_kernel

    return sort_kernel


def _warn(error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    warnings.warn(f"lists are ranked in torch, which is slower: {reason}", stacklevel=3)


def _try_out(kernel: ModuleType) -> None:
    """Compiles what a ranker calls, for the types that it calls it with."""
    one, none = np.zeros((1, 4)), np.zeros((0, 0))
    single_one, single_none = one.astype(np.float32), none.astype(np.float32)
    widths, nothing = np.array([4]), np.zeros(0)
    tower_d = (widths, nothing, nothing, np.zeros(4))
    tower = (widths, *(x.astype(np.float32) for x in tower_d[1:]))
    of_users = kernel.bind(one, (0, np.zeros((4, 4)), np.zeros(4)), 4, True, False, (1.0,) * 5)
    single = (*of_users[0], *[single_one] * 4, single_none, tower)
    double = (*of_users[1], one, one, none, tower_d)
    rows, linear = np.zeros((1, 1), dtype=np.int64), (0, one, nothing)
    ranked, counts = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
    cube = np.zeros((1, 1, 1), dtype=np.float32)
    kernel.scan_batch(rows, 1, one, linear, single, double, TIES, ranked, counts)
    kernel.mean_margins(np.zeros(2, dtype=np.int64), 1, one, linear, single, np.zeros((1, 1)))
    kernel.all_margins(rows, one, linear, single, double, TIES, cube)
    pair = np.zeros((1, 2), dtype=np.int64)
    kernel.against(pair, 1, one, linear, single, double, TIES, cube, cube[0])
