"""Checks of the numbers in a configuration."""

from __future__ import annotations

from ncr_core.errors import ConfigError


def at_least(config: object, low: int, *names: str) -> None:
    """Raises ConfigError unless each of the attributes is ``low`` or more."""
    for name in names:
        value = getattr(config, name)
        if not value >= low:  # NaN fails too
            raise ConfigError(f"{name} must be at least {low}, not {value}")


def above_zero(config: object, *names: str) -> None:
    """Raises ConfigError unless each of the attributes is above zero."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
