"""Options that are made from the configurations of models and of training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from ncr_core.model_config import ModelConfig
from ncr_core.parameters import ConfigField, parameters_of
from ncr_core.train_config import TrainConfig

_SPECS = {
    spec.public_name: spec
    for config in (ModelConfig, TrainConfig)
    for spec in parameters_of(config)
    if spec.parameter.option
}


def with_hyperparameters(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for every hyper-parameter.

    The command takes those that were given as the argument ``hyperparameters``: values by the name
    of the configuration's field, for ``Recipe.with_``.
    """

    @functools.wraps(command)
    def run(context: typer.Context, **arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in _SPECS}
        return command(**arguments, hyperparameters=_explicit(values, context))

    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "hyperparameters"]
    required = [p for p in own if p.default is p.empty]
    optional = [p for p in own if p.default is not p.empty]
    generated = [_option(spec) for spec in _SPECS.values()]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(kind=p.KEYWORD_ONLY) for p in (context, *required, *generated, *optional)
        ]
    )
    return run


def _option(spec: ConfigField) -> inspect.Parameter:
    kind, default, flag = spec.type, spec.default, f"--{spec.public_name.replace('_', '-')}"
    if kind == tuple[int, ...]:
        kind, default = list[int] | None, None
    if kind is bool and spec.parameter.negation:
        flag = f"{flag}/{spec.parameter.negation}"
    option = typer.Option(flag, help=spec.parameter.help)
    return inspect.Parameter(
        spec.public_name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _explicit(values: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The values that were given on the command line, by the name of the configuration's field.

    The others are left to the recipe.
    """
    explicit = {}
    for name, value in values.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            explicit[_SPECS[name].name] = tuple(value) if isinstance(value, list) else value
    return explicit
