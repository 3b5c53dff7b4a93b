"""Optional libraries, which are imported at their first use if they are installed."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ncr_core.errors import ConfigError


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # None in sys.modules
        return False


def require(module: str, extra: str) -> Any:
    """The imported module.

    Raises ConfigError if the library is missing; the message names the ``extra`` to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this needs the library {module.partition('.')[0]!r} ({error}): "
            f'pip install "neural-collaborative-ranking[{extra}]"'
        ) from error


@cache
def numba_kernel(module: str) -> ModuleType | None:
    """A module of numba functions, compiled once a process for the types of its calls.

    The module has ``compile_all()``. If the compiled code cannot be stored on disk or is damaged
    there, the functions are compiled for this process alone. Returns None if numba is missing or
    its compiler is switched off, and with a warning if compilation fails. Callers then use torch.
    """
    try:
        import numba

        kernel = import_module(module)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        _warn(module, error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # Python would take minutes
        return None
    try:
        kernel.compile_all()
    except Exception:  # a full disk, or a damaged file of compiled code
        try:
            _discard_cache(kernel)
            kernel.compile_all()
        except Exception as error:
            _warn(module, error)
            return None
    return kernel


def _discard_cache(kernel: ModuleType) -> None:
    """Makes the functions that the module uses compile without the code on disk."""
    from numba.core.caching import NullCache
    from numba.core.registry import CPUDispatcher

    for value in vars(kernel).values():
        if isinstance(value, CPUDispatcher):
            value._cache = NullCache()  # type: ignore[attr-defined]


def _warn(module: str, error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    warnings.warn(
        f"{module} cannot be compiled; torch replaces the module and is slower: {reason}",
        stacklevel=4,
    )
