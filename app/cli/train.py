"""`ncr train`: a model on a data set, without the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.common import EpochLines
from app.cli.datasets import DataOption, Protocol, read_split
from app.cli.import_ import (
    FormatOption,
    ItemColumn,
    RatingColumn,
    TimeColumn,
    UserColumn,
    columns_of,
)
from app.cli.options import with_hyperparameters


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(with_hyperparameters(train))


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="The folder to make for the checkpoint.")],
    hyperparameters: dict[str, Any],
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
    from ncr_core.errors import CheckpointError
    from ncr_core.recipes import recipe
    from ncr_core.training.offline import train_checkpoint

    if out.exists():  # before an hour of training is spent
        raise CheckpointError(f"{out} exists already; a checkpoint is never overwritten")
    chosen = recipe("default").with_(**hyperparameters)
    chosen.training.torch_device()
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
        )
    quality = f"validation NDCG@10 {training.validation['ndcg']:.4f}"
    typer.echo(f"trained in {training.seconds:.0f} s, {quality}: {out}")
