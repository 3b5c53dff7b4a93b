"""The compiled fit: loaded when it is first asked for, tried out, and done without if need be."""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

from ncr_core.ranking.loader import kernel_or_none


@cache
def fit_kernel_or_none() -> ModuleType | None:
    """The compiled code, tried out once; None where it cannot be had, as the ranker's, which warns,
    or with a warning of its own."""
    if kernel_or_none() is None:
        return None
    try:
        from ncr_core.fold_in import kernel

        try:
            kernel.try_out()
        except Exception:  # a full disk, or a damaged file of compiled code
            kernel.keep_nothing()
            kernel.try_out()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"vectors are fitted in torch, which is slower: {reason}", stacklevel=2)
        return None
    return kernel
