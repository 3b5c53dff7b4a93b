"""`ncr train` and `ncr evaluate`: a model on a data set, without the service.

The options for hyper-parameters are made from the configurations of models and of training.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.common import EpochLines, bar, console
from app.cli.datasets import (
    BadRows,
    DataOption,
    Format,
    FormatOption,
    ItemColumn,
    Protocol,
    RatingColumn,
    TimeColumn,
    UserColumn,
)
from ncr_core.errors import DataError
from ncr_core.model_config import ModelConfig
from ncr_core.parameters import ConfigField, parameters_of
from ncr_core.train_config import TrainConfig

if TYPE_CHECKING:
    from ncr_core.checkpoint import Checkpoint
    from ncr_core.data import Interactions, Split
    from ncr_core.data.readers import Columns
    from ncr_core.data.splits import TemporalSplit
    from ncr_core.evaluation.protocols import CandidateSet
    from ncr_core.reproduction.datasets import PublishedSplit

_SPECS = {
    spec.public_name: spec
    for config in (ModelConfig, TrainConfig)
    for spec in parameters_of(config)
    if spec.parameter.option
}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(with_hyperparameters(train))
    app.command()(evaluate)


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="The folder to create for the checkpoint.")],
    hyperparameters: dict[str, Any],
    recipe_name: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="The recipe. auto trains several recipes and keeps the best by validation. "
            "Default: auto, or default if a hyper-parameter is given.",
        ),
    ] = None,
    protocol: Annotated[
        Protocol,
        typer.Option(
            help="p1: test on the latest item of each user. p2: the published NCF split, with "
            "ncf-ml-1m and ml-1m in DATA. temporal: test on the first item of each user "
            "after one time for all users."
        ),
    ] = "p1",
    quantile: Annotated[
        float, typer.Option(help="The share of interactions before the cut of protocol temporal.")
    ] = 0.9,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Train again with the validation items, for the number of epochs that "
            "validation chose.",
        ),
    ] = False,
    min_interactions: Annotated[
        int, typer.Option(min=1, help="The minimum number of interactions of an item.")
    ] = 10,
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="The number of processes of this machine that train the model together, started "
            "by torchrun. With 1 the command's own process trains.",
        ),
    ] = 1,
    tables: Annotated[
        Literal["replicated", "sharded"],
        typer.Option(
            help="With several processes: whether each has whole embedding tables, or some rows of "
            "every table."
        ),
    ] = "replicated",
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Train a model on a data set, without the service.

    Protocol p1 tests on the latest item of each user and validates on the item before. The model
    learns from the other items.
    """
    from ncr_core.data.array_storage import IN_MEMORY, ArrayStorage, FileStorage, storing_tables
    from ncr_core.data.readers import Columns
    from ncr_core.errors import CheckpointError, ConfigError
    from ncr_core.recipes import AUTO_RECIPE, recipe
    from ncr_core.training.offline import train_checkpoint
    from ncr_core.training.ranks import SHARDED_KINDS
    from ncr_core.training.torchrun import TorchrunEngine

    if tables == "sharded" and ranks == 1:
        raise ConfigError("--tables sharded is for several processes: give --ranks 2 or more")
    if out.exists():  # before an hour of training is spent
        raise CheckpointError(f"{out} exists already; the command never overwrites a checkpoint")
    fixed = sorted(hyperparameters.keys() - {"seed", "device"})
    name = recipe_name or ("default" if fixed else AUTO_RECIPE)
    if name == AUTO_RECIPE and fixed:
        raise ConfigError(f"the recipe auto chooses these parameters: {', '.join(fixed)}")
    base = recipe("default" if name == AUTO_RECIPE else name).with_(**hyperparameters)
    base.training.torch_device()
    chosen = None if name == AUTO_RECIPE else base
    if tables == "sharded" and chosen is not None and chosen.model.kind not in SHARDED_KINDS:
        raise ConfigError(f"--tables sharded is for {' and '.join(SHARDED_KINDS)}")
    columns = Columns(user_column, item_column, rating_column, timestamp_column)
    split, description = read_split(data, protocol, format_, columns, min_interactions, quantile)
    # Sharded tables may be larger than the memory of this process.
    storage: ArrayStorage = IN_MEMORY
    if tables == "sharded":
        out.parent.mkdir(parents=True, exist_ok=True)
        storage = FileStorage(out.parent)
    with EpochLines() as lines, storing_tables(storage):
        training = train_checkpoint(
            chosen,
            split,
            out,
            refit=refit,
            data=description,
            on_progress=lambda progress: lines.show(vars(progress)),
            device=base.training.device,
            seed=base.training.seed,
            run_phase=TorchrunEngine(ranks, tables, out.parent) if ranks > 1 else None,
        )
    for tried in training.tried:
        typer.echo(tried.line())
    quality = f"validation NDCG@10 {training.validation['ndcg']:.4f}"
    typer.echo(f"{training.recipe.name}: trained in {training.seconds:.0f} s, {quality}: {out}")


def with_hyperparameters(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for every hyper-parameter.

    The command gets the given values as the argument ``hyperparameters``, by the names of the
    configurations' fields, for ``Recipe.with_``.
    """

    @functools.wraps(command)
    def run(context: typer.Context, **arguments: Any) -> None:
        explicit = {}  # the others are left to the recipe
        for name, spec in _SPECS.items():
            value, source = arguments.pop(name), context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                explicit[spec.name] = tuple(value) if isinstance(value, list) else value
        return command(**arguments, hyperparameters=explicit)

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


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of the checkpoint.")],
    data: DataOption,
    protocol: Annotated[
        Protocol | None,
        typer.Option(
            help="p1: the latest item of each user, among 100 sampled items and among all "
            "items. p2: the published NCF split, among its 99 items and among all items. "
            "temporal: first items after one time for all users, among all items, by the "
            "time since the last item. Default: the protocol of the training."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the sampled items.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="The device: auto, cpu, cuda or cuda:N.")] = "auto",
    format_: FormatOption = "auto",
    user_column: UserColumn = "user",
    item_column: ItemColumn = "item",
    rating_column: RatingColumn = "rating",
    timestamp_column: TimeColumn = "timestamp",
) -> None:
    """Measure a checkpoint of `ncr train` on its test items."""
    from ncr_core.checkpoint import load_checkpoint
    from ncr_core.data.readers import Columns
    from ncr_core.evaluation.protocols import ModelRanks, evaluate_full, evaluate_sampled
    from ncr_core.training import resolve_device

    loaded = load_checkpoint(checkpoint, resolve_device(device))
    trained_protocol = _trained_protocol(checkpoint, loaded)
    if protocol not in (None, trained_protocol):
        raise DataError(
            f"{checkpoint} was trained for protocol {trained_protocol}: the model may have "
            f"learned test items of {protocol}; train a model with --protocol {protocol}"
        )
    columns = Columns(user_column, item_column, rating_column, timestamp_column)
    if trained_protocol == "temporal":
        _evaluate_temporal(checkpoint, loaded, data, format_, columns, seed, as_json)
        return
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
    """The protocol of a checkpoint's training. Raises DataError for an unknown protocol."""
    data = loaded.manifest["data"]
    if "min_interactions" not in data:
        raise DataError(
            f"{checkpoint} was not made by `ncr train`, so its training data is unknown: the "
            "manifest has its figures"
        )
    trained: Protocol = data["protocol"] if data.get("protocol") in ("p2", "temporal") else "p1"
    return trained


def _evaluate_temporal(
    checkpoint: Path,
    loaded: Checkpoint,
    data: Path,
    format_: Format,
    columns: Columns,
    seed: int,
    as_json: bool,
) -> None:
    """Prints the metrics of users' first items after the cut, by the gap before them.

    Raises:
        DataError: The data set is not the one that the checkpoint was trained on.
    """
    import numpy as np

    from ncr_core.evaluation.by_gap import evaluate_temporal
    from ncr_core.evaluation.protocols import ModelRanks
    from ncr_core.models.user_embeddings import GAPS_SECONDS
    from ncr_core.training.trainer import remember

    trained_on = loaded.manifest["data"]
    split = read_temporal_split(
        data, format_, columns, trained_on["min_interactions"], trained_on["quantile"]
    )
    _check_counts(checkpoint, loaded, data, split.all_seen)
    if (split.train.user_ids, split.train.item_ids) != (loaded.user_ids, loaded.item_ids):
        raise DataError(f"{data} has other users or items than {checkpoint} was trained on")
    remember(loaded.model, split.test_input)
    classes = None
    if loaded.model.fitted_gaps:
        gaps = np.searchsorted(GAPS_SECONDS, np.nan_to_num(split.gaps))
        classes = np.where(np.isin(gaps, list(loaded.model.fitted_gaps)), gaps, 0)
    with bar(counted=True) as progress:
        task = progress.add_task("full ranking", total=int((split.test >= 0).sum()))
        found = evaluate_temporal(
            ModelRanks(loaded.model, classes),
            split,
            seed,
            on_users=lambda n: progress.advance(task, n),
        )
    if as_json:
        report = {
            "protocol": "temporal",
            "quantile": trained_on["quantile"],
            "cut": split.cut,
            "seed": seed,
            "model": loaded.model.config.as_dict(),
            "untrained_test_items": split.untrained_test_items,
            "newcomers": split.newcomers,
            "gaps": {name: metrics.as_dict() for name, metrics in found.items()},
        }
        typer.echo(json.dumps(report))
        return
    for name, metrics in found.items():
        typer.echo(metrics.line(name))


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


# The data sets of both commands


def read_split(
    path: Path,
    protocol: Protocol,
    format_: Format,
    columns: Columns,
    min_interactions: int,
    quantile: float,
) -> tuple[Split, dict[str, Any]]:
    """Reads a data set and splits it by a protocol.

    Args:
        path: A file or a folder; for p2 the folder that holds ncf-ml-1m and ml-1m.
        protocol: p1: the latest item of each user is for test; p2: the published NCF split;
            temporal: see `temporal_split`.
        format_: The format of the files.
        columns: The names of the files' columns.
        min_interactions: The minimum number of interactions of an item. Protocol temporal
            counts interactions before the cut, and p2 ignores the argument.
        quantile: The share of interactions before the cut, by temporal.

    Returns:
        The split, and a description of the data set for a checkpoint's manifest.

    Raises:
        DataError: The data cannot be read, or some users have no items left to rank.
    """
    from ncr_core.data.splits import check_rankable, leave_latest_out

    if protocol == "p2":
        split: Split = read_published_split(path)
        min_interactions = 1
    elif protocol == "temporal":
        split = read_temporal_split(path, format_, columns, min_interactions, quantile)
    else:
        split = leave_latest_out(read_interactions(path, format_, columns, min_interactions))
    check_rankable(split)
    return split, {
        "name": path.name,
        "protocol": "leave-latest-out" if protocol == "p1" else protocol,
        "min_interactions": min_interactions,
        **({"quantile": quantile} if protocol == "temporal" else {}),
        **counts(split.all_seen),
    }


def read_temporal_split(
    path: Path, format_: Format, columns: Columns, min_interactions: int, quantile: float
) -> TemporalSplit:
    """A data set split at one time for all users. Prints the numbers of omitted items and users."""
    from ncr_core.data.splits import temporal_split

    # Which items are kept must not depend on what comes after the cut.
    interactions = read_interactions(path, format_, columns, 1)
    split = temporal_split(interactions, quantile, min_interactions)
    console.print(
        f"{int((split.test >= 0).sum()):,} users have a test item; "
        f"{split.untrained_test_items:,} test items that no training has are left out, and "
        f"{split.newcomers:,} users without an item before the cut"
    )
    return split


def read_published_split(root: Path) -> PublishedSplit:
    """The published NCF split under a folder. Raises DataError if the rows have other ids."""
    from ncr_core.reproduction.datasets import load_ncf

    split = load_ncf(root)
    console.print(described(split.all_seen))
    return split


def read_interactions(path: Path, format_: Format, columns: Columns, at_least: int) -> Interactions:
    """Reads a data set, drops items below ``at_least`` interactions, and prints the counts."""
    from ncr_core.data import min_interactions
    from ncr_core.data.dataset import read_source as read
    from ncr_core.data.readers import open_source
    from ncr_core.data.snapshot import Snapshot, is_snapshot

    if is_snapshot(path):
        filtered = min_interactions(Snapshot.open(path).read(), at_least)
        console.print(described(filtered))
        return filtered
    source = open_source(path, format_, columns)
    bad = BadRows()
    with bar() as progress:
        task = progress.add_task(f"read {source.name}", total=source.total_bytes or None)
        interactions = read(source, on_bad=bad, on_bytes=lambda n: progress.advance(task, n))
    filtered = min_interactions(interactions, at_least)
    console.print(f"{described(filtered)} ({bad.summary()})")
    return filtered


def described(interactions: Interactions) -> str:
    """The counts of a data set, in words."""
    return (
        f"{interactions.n_users:,} users, {interactions.n_items:,} items, "
        f"{interactions.nnz:,} interactions"
    )


def counts(interactions: Interactions) -> dict[str, int]:
    """The counts of a data set, for a manifest."""
    return {
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
    }
