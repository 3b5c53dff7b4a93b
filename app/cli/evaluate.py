"""`ncr evaluate`: how good a checkpoint of `ncr train` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.common import bar
from app.cli.data import FormatOption, ItemColumn, RatingColumn, TimeColumn, UserColumn, columns_of
from app.cli.reading import DataOption, counts, described, published, read_interactions

if TYPE_CHECKING:
    from ncr_core.data import Interactions, Split


def register(app: typer.Typer) -> None:
    app.command()(evaluate)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    data: DataOption,
    protocol: Annotated[
        Literal["p1", "p2"] | None,
        typer.Option(
            help="p1: latest item out, 100 sampled items, and all; p2: the published NCF split, "
            "its 99 items, and all. What the checkpoint was trained for, unless given."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampled items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Measure a checkpoint of `ncr train` on the test items that it was not shown."""
    from ncr_core.checkpoint import load_checkpoint
    from ncr_core.data import leave_latest_out
    from ncr_core.errors import DataError
    from ncr_core.evaluation.protocols import (
        ModelRanks,
        evaluate_full,
        evaluate_sampled,
        given_candidates,
        sampled_candidates,
    )
    from ncr_core.training import resolve_device

    loaded = load_checkpoint(checkpoint, resolve_device(device))
    made_of = loaded.manifest["data"]
    if "min_interactions" not in made_of:
        raise DataError(
            f"{checkpoint} was not made by `ncr train`, so what it was trained on is not known: "
            "its own figures are in its manifest"
        )
    own = "p2" if made_of.get("protocol") == "p2" else "p1"
    if protocol not in (None, own):
        raise DataError(
            f"{checkpoint} was trained for protocol {own}: some of what {protocol} tests on may be "
            f"what it learned; train one with --protocol {protocol}"
        )
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)

    def check(interactions: Interactions) -> None:
        found = counts(interactions)
        if found != {key: made_of.get(key) for key in found}:
            raise DataError(
                f"{data} is not what {checkpoint} was trained on: it has "
                f"{described(interactions)}, the checkpoint was trained on "
                f"{made_of['interactions']:,} interactions"
            )

    split: Split
    if own == "p2":
        split = given = published(data)
        check(split.all_seen)
        ids = (split.train.user_ids, split.train.item_ids)
        if ids != (loaded.user_ids, loaded.item_ids):
            raise DataError(
                f"{data} has other users or items, or in another order, than {checkpoint} was "
                "trained on"
            )
        candidates = given_candidates(given, seed)
    else:
        interactions = read_interactions(data, format_, columns, int(made_of["min_interactions"]))
        check(interactions)
        split = leave_latest_out(interactions.reindex(loaded.user_ids, loaded.item_ids))
        candidates = sampled_candidates(split, split.test, seed)
    model = ModelRanks(loaded.model)
    sampled = evaluate_sampled(model, candidates)
    if not as_json:
        typer.echo(sampled.line("sampled"))
    with bar(counted=True) as progress:
        task = progress.add_task("full ranking", total=int((split.test >= 0).sum()))
        full = evaluate_full(
            model, split, split.test, seed, on_users=lambda n: progress.advance(task, n)
        )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "protocol": own,
                    "seed": seed,
                    "model": loaded.model.config.as_dict(),
                    "sampled": sampled.as_dict(),
                    "full": full.as_dict(),
                }
            )
        )
    else:
        typer.echo(full.line("full"))
