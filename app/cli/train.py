"""`ncr train`: a model on a data set, without the service.

Its options for hyper-parameters are made from the configurations of models and of training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.common import EpochLines
from app.cli.datasets import (
    DataOption,
    FormatOption,
    ItemColumn,
    Protocol,
    RatingColumn,
    TimeColumn,
    UserColumn,
    columns_of,
    read_split,
)
from ncr_core.model_config import ModelConfig
from ncr_core.parameters import ConfigField, parameters_of
from ncr_core.train_config import TrainConfig

_SPECS = {
    spec.public_name: spec
    for config in (ModelConfig, TrainConfig)
    for spec in parameters_of(config)
    if spec.parameter.option
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(with_hyperparameters(train))


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="The folder to make for the checkpoint.")],
    hyperparameters: dict[str, Any],
    recipe_name: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="auto tries a few recipes and keeps the best on this data; any other name trains "
            "that one. By default auto, or default with any hyper-parameter.",
        ),
    ] = None,
    protocol: Annotated[
        Protocol,
        typer.Option(help="p2: the published NCF split; DATA holds ncf-ml-1m and ml-1m."),
    ] = "p1",
    refit: Annotated[
        bool,
        typer.Option(
            "--refit", help="Train once more with the validation items, as long as they chose."
        ),
    ] = False,
    min_interactions: Annotated[
        int, typer.Option(min=1, help="Keep items with at least so many.")
    ] = 10,
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Train a model on a data set.

    The latest item of each user is for test, the one before for validation, the rest is learned
    from (protocol P1).
    """
    from ncr_core.errors import CheckpointError, ConfigError
    from ncr_core.recipes import AUTO_RECIPE, recipe
    from ncr_core.training.offline import train_checkpoint

    if out.exists():  # before an hour of training is spent
        raise CheckpointError(f"{out} exists already; a checkpoint is never overwritten")
    fixed = sorted(hyperparameters.keys() - {"seed", "device"})
    name = recipe_name or ("default" if fixed else AUTO_RECIPE)
    if name == AUTO_RECIPE and fixed:
        raise ConfigError(f"the recipe auto chooses these itself: {', '.join(fixed)}")
    base = recipe("default" if name == AUTO_RECIPE else name).with_(**hyperparameters)
    base.training.torch_device()
    chosen = None if name == AUTO_RECIPE else base
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    split, description = read_split(data, protocol, format_, columns, min_interactions)
    with EpochLines() as lines:
        training = train_checkpoint(
            chosen,
            split,
            out,
            refit=refit,
            data=description,
            on_progress=lambda progress: lines.show(vars(progress)),
            device=base.training.device,
            seed=base.training.seed,
        )
    for tried in training.tried:
        typer.echo(tried.line())
    quality = f"validation NDCG@10 {training.validation['ndcg']:.4f}"
    typer.echo(f"{training.recipe.name}: trained in {training.seconds:.0f} s, {quality}: {out}")


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
