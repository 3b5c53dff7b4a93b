"""Libraries that only some baselines need, imported when one of those is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ncr_core.errors import ConfigError


def require(module: str, extra: str) -> Any:
    """The imported module; raises ConfigError that names the extra to install without it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this needs the library {module.partition('.')[0]!r} ({error}): "
            f'pip install "neural-collaborative-ranking[{extra}]"'
        ) from error
