"""Hyper-parameters as dataclass fields: each field says its bounds, its help and where it is set.

``ncr train`` makes its options, and ``POST /admin/train`` its fields, from these declarations. A
new hyper-parameter is one new field of ``ModelConfig`` or ``TrainConfig``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ncr_core.errors import ConfigError

_KEY = "parameter"


@dataclass(frozen=True)
class Parameter:
    """The declaration of a hyper-parameter beside its type and its default."""

    help: str = ""
    """One line for the help of a command."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    """The bounds of the library: any of ``ge``, ``gt``, ``le`` and ``lt``."""

    name: str | None = None
    """The name of the option and of the request's field, if it differs from the dataclass's."""

    negation: str | None = None
    """The option that switches a boolean off, such as ``--no-pretrain``."""

    option: bool = True
    """Whether ``ncr train`` has an option for the hyper-parameter."""

    request: Mapping[str, float] | None = None
    """Further bounds in a request for training; None if requests do not have the field."""

    request_type: Any = None
    """The type in a request, where the service accepts fewer values than the library."""

    by_setting: bool = False
    """Whether a setting of the service (``default_…``) gives the default of a request."""


def parameter(
    default: Any,
    help: str = "",  # noqa: A002 - as command line libraries name it
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    **more: Any,
) -> Any:
    """A dataclass field with a ``Parameter``; ``more`` are fields of ``Parameter`` by name."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    stated = {name: bound for name, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={_KEY: Parameter(help, stated, **more)})


@dataclass(frozen=True)
class ConfigField:
    """A field of a configuration dataclass that is a hyper-parameter."""

    name: str
    type: Any
    default: Any
    parameter: Parameter

    @property
    def public_name(self) -> str:
        """The name in options and requests."""
        return self.parameter.name or self.name


def parameters_of(config: type[Any]) -> tuple[ConfigField, ...]:
    """The hyper-parameters of a configuration dataclass, in the order of its fields."""
    types = get_type_hints(config)
    return tuple(
        ConfigField(f.name, types[f.name], f.default, f.metadata[_KEY])
        for f in fields(config)
        if _KEY in f.metadata
    )


def check_parameters(config: Any) -> None:
    """Checks every hyper-parameter against its choices and bounds.

    Raises ConfigError if a value is not one of the choices, of another type, or out of bounds.
    """
    for spec in parameters_of(type(config)):
        value = getattr(config, spec.name)
        choices = get_args(spec.type) if get_origin(spec.type) is Literal else ()
        if choices and value not in choices:
            raise ConfigError(f"{spec.name} must be one of {', '.join(choices)}, not {value!r}")
        if spec.type in (int, float) and not _within(value, spec):
            raise ConfigError(f"{spec.name} must be {_range_text(spec)}, not {value}")


def _within(value: Any, spec: ConfigField) -> bool:
    allowed = int if spec.type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        return False
    bounds = spec.parameter.bounds
    return bounds.get("ge", -math.inf) <= value <= bounds.get("le", math.inf) and bounds.get(
        "gt", -math.inf
    ) < value < bounds.get("lt", math.inf)


def _range_text(spec: ConfigField) -> str:
    bounds = spec.parameter.bounds
    if "ge" in bounds and "le" in bounds:
        low, high = f"{bounds['ge']:,}", f"{bounds['le']:,}"
        return f"{low} to {high}" if spec.type is int else f"between {low} and {high}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [f"{words[name]} {bound:,}" for name, bound in bounds.items()]
    if spec.type is float and not bounds.keys() & {"le", "lt"}:
        limits.append("finite")
    return " and ".join(limits) or "a number"
