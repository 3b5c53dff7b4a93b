"""`ncr train` and `ncr evaluate`: the method on a data set, without the service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.common import EpochLines, bar, console
from app.cli.data import (
    BadRows,
    Format,
    FormatOption,
    ItemColumn,
    RatingColumn,
    TimeColumn,
    UserColumn,
    columns_of,
)

if TYPE_CHECKING:
    from ncr_core.data import Interactions
    from ncr_core.data.readers import Columns
    from ncr_core.training import Progress

DataOption = Annotated[Path, typer.Option("--data", help="A file or a folder of interactions.")]


def register(app: typer.Typer) -> None:
    app.command()(train)
    app.command()(evaluate)


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="The folder to make for the checkpoint.")],
    model: Annotated[Literal["nbpr", "dncr", "neupr"], typer.Option(help="The model.")] = "neupr",
    factors: Annotated[int, typer.Option(help="d, the predictive factors.")] = 8,
    layers: Annotated[int, typer.Option(help="N, the hidden layers of the tower.")] = 4,
    activation: Annotated[Literal["tanh", "relu"], typer.Option(help="Of the layers.")] = "tanh",
    init: Annotated[
        Literal["xavier", "paper"], typer.Option(help="`paper`: N(0, 0.01²) everywhere.")
    ] = "xavier",
    epochs: Annotated[int, typer.Option(help="Passes over the data, at most.")] = 15,
    negatives: Annotated[int, typer.Option(help="Negatives a positive (paper: 1).")] = 4,
    batch_size: Annotated[
        int, typer.Option(help="Positives a step (paper: 256); 0 chooses by the data's size.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="Adam's peak learning rate.")] = 1e-2,
    schedule: Annotated[
        Literal["one-cycle", "constant"], typer.Option(help="Of the learning rate.")
    ] = "one-cycle",
    stopping: Annotated[
        Literal["validation", "paper"],
        typer.Option(help="By validation NDCG@10, or the paper's 0.1 % rule."),
    ] = "validation",
    pretrain: Annotated[
        bool, typer.Option("--pretrain/--no-pretrain", help="NeuPR from a trained NBPR and DNCR.")
    ] = True,
    alpha: Annotated[float, typer.Option(help="α of eq. 26, the share of the NBPR part.")] = 0.5,
    min_interactions: Annotated[
        int, typer.Option(min=1, help="Keep items with at least so many.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Train a model on a data set: the latest item of each user is for test, the one before for
    validation, the rest is learned from (protocol P1)."""
    from ncr_core.checkpoint import save_checkpoint
    from ncr_core.data import leave_latest_out
    from ncr_core.errors import CheckpointError
    from ncr_core.models import ModelConfig
    from ncr_core.training import TrainConfig, train_model

    if out.exists():  # before an hour of training is spent
        raise CheckpointError(f"{out} exists already; a checkpoint is never overwritten")
    model_config = ModelConfig(
        kind=model, factors=factors, layers=layers, activation=activation, init=init
    )
    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        negatives=negatives,
        learning_rate=learning_rate,
        schedule=schedule,
        stopping=stopping,
        pretrain=pretrain,
        alpha=alpha,
        seed=seed,
        device=device,
    )
    config.torch_device()
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    interactions = read_interactions(data, format_, columns, min_interactions)
    split = leave_latest_out(interactions)
    started = time.perf_counter()
    with EpochLines() as lines:

        def on_progress(progress: Progress) -> None:
            lines.show(vars(progress))

        trained = train_model(model_config, config, split, on_progress)
    seconds = time.perf_counter() - started
    last = trained.history[-1]
    best = last.best_epoch - 1
    validation = {"hr": last.hr[best], "ndcg": last.ndcg[best]}
    save_checkpoint(
        out,
        trained.model,
        user_ids=interactions.user_ids,
        item_ids=interactions.item_ids,
        item_counts=split.train.item_counts(),
        metrics={"validation": validation},
        training={
            "config": config.as_dict(),
            "seconds": round(seconds, 1),
            "history": [vars(history) for history in trained.history],
        },
        data={
            "name": data.name,
            "protocol": "leave-latest-out",
            "min_interactions": min_interactions,
            **_counts(interactions),
        },
    )
    typer.echo(f"trained in {seconds:.0f} s, validation NDCG@10 {validation['ndcg']:.4f}: {out}")


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    data: DataOption,
    protocol: Annotated[
        Literal["p1"], typer.Option(help="p1: leave latest out, 100 sampled items; and all.")
    ] = "p1",
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
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    interactions = read_interactions(data, format_, columns, int(made_of["min_interactions"]))
    if _counts(interactions) != {k: made_of.get(k) for k in ("users", "items", "interactions")}:
        raise DataError(
            f"{data} is not what {checkpoint} was trained on: it has {_described(interactions)}, "
            f"the checkpoint was trained on {made_of['interactions']:,} interactions"
        )
    split = leave_latest_out(interactions.reindex(loaded.user_ids, loaded.item_ids))
    model = ModelRanks(loaded.model)
    sampled = evaluate_sampled(model, sampled_candidates(split, split.test, seed))
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
                    "protocol": protocol,
                    "seed": seed,
                    "model": loaded.model.config.as_dict(),
                    "sampled": sampled.as_dict(),
                    "full": full.as_dict(),
                }
            )
        )
    else:
        typer.echo(full.line("full"))


def read_interactions(path: Path, format_: Format, columns: Columns, at_least: int) -> Interactions:
    """Reads and filters a data set, and says what is left of it."""
    from ncr_core.data import build_interactions, min_interactions
    from ncr_core.data.readers import open_source

    source = open_source(path, format_, columns)
    bad = BadRows()
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        chunks = source.interactions(on_bad=bad, on_bytes=lambda n: progress.advance(task, n))
        interactions = build_interactions(
            (
                row.user,
                row.item,
                row.timestamp if row.timestamp is not None else float(row.position or 0),
            )
            for chunk in chunks
            for row in chunk
        )
    kept = min_interactions(interactions, at_least)
    console.print(f"{_described(kept)} ({bad.summary()})")
    return kept


def _described(interactions: Interactions) -> str:
    return (
        f"{interactions.n_users:,} users, {interactions.n_items:,} items, "
        f"{interactions.nnz:,} interactions"
    )


def _counts(interactions: Interactions) -> dict[str, Any]:
    return {
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
    }
