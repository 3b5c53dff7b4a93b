"""`ncr evaluate`: how good a checkpoint of `ncr train` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.common import bar
from app.cli.datasets import (
    DataOption,
    Format,
    FormatOption,
    ItemColumn,
    Protocol,
    RatingColumn,
    TimeColumn,
    UserColumn,
    columns_of,
    counts,
    described,
    read_interactions,
    read_published_split,
)
from ncr_core.errors import DataError

if TYPE_CHECKING:
    from ncr_core.checkpoint import Checkpoint
    from ncr_core.data import Interactions, Split
    from ncr_core.data.readers import Columns
    from ncr_core.evaluation.protocols import CandidateSet


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(evaluate)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    data: DataOption,
    protocol: Annotated[
        Protocol | None,
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
    from ncr_core.evaluation.protocols import ModelRanks, evaluate_full, evaluate_sampled
    from ncr_core.training import resolve_device

    loaded = load_checkpoint(checkpoint, resolve_device(device))
    trained_protocol = _trained_protocol(checkpoint, loaded)
    if protocol not in (None, trained_protocol):
        raise DataError(
            f"{checkpoint} was trained for protocol {trained_protocol}: some of what {protocol} "
            f"tests on may be what it learned; train one with --protocol {protocol}"
        )
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    split, candidates = _read_test_items(checkpoint, loaded, data, format_, columns, seed)
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
        report = {
            "protocol": trained_protocol,
            "seed": seed,
            "model": loaded.model.config.as_dict(),
            "sampled": sampled.as_dict(),
            "full": full.as_dict(),
        }
        typer.echo(json.dumps(report))
    else:
        typer.echo(full.line("full"))


def _trained_protocol(checkpoint: Path, loaded: Checkpoint) -> Protocol:
    """The protocol that a checkpoint was trained for. Raises DataError where that is not known."""
    data = loaded.manifest["data"]
    if "min_interactions" not in data:
        raise DataError(
            f"{checkpoint} was not made by `ncr train`, so what it was trained on is not known: "
            "its own figures are in its manifest"
        )
    return "p2" if data.get("protocol") == "p2" else "p1"


def _read_test_items(
    checkpoint: Path,
    loaded: Checkpoint,
    data: Path,
    format_: Format,
    columns: Columns,
    seed: int,
) -> tuple[Split, CandidateSet]:
    """The split that a checkpoint was trained on, and the candidates of its test items.

    Raises:
        DataError: The data set is not the one that the checkpoint was trained on.
    """
    from ncr_core.data import leave_latest_out
    from ncr_core.evaluation.protocols import given_candidates, sampled_candidates

    ids = (loaded.user_ids, loaded.item_ids)
    if _trained_protocol(checkpoint, loaded) == "p2":
        published = read_published_split(data)
        _check_counts(checkpoint, loaded, data, published.all_seen)
        if (published.train.user_ids, published.train.item_ids) != ids:
            raise DataError(
                f"{data} has other users or items, or in another order, than {checkpoint} was "
                "trained on"
            )
        return published, given_candidates(published, seed)
    at_least = int(loaded.manifest["data"]["min_interactions"])
    interactions = read_interactions(data, format_, columns, at_least)
    _check_counts(checkpoint, loaded, data, interactions)
    split = leave_latest_out(interactions.reindex(*ids))
    return split, sampled_candidates(split, split.test, seed)


def _check_counts(
    checkpoint: Path, loaded: Checkpoint, data: Path, interactions: Interactions
) -> None:
    trained_on = loaded.manifest["data"]
    if any(trained_on.get(name) != count for name, count in counts(interactions).items()):
        raise DataError(
            f"{data} is not what {checkpoint} was trained on: it has {described(interactions)}, "
            f"the checkpoint was trained on {trained_on['interactions']:,} interactions"
        )
