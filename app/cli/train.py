"""`ncr train`: a model on a data set, without the service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.common import EpochLines
from app.cli.data import FormatOption, ItemColumn, RatingColumn, TimeColumn, UserColumn, columns_of
from app.cli.reading import DataOption, counts, published, read_interactions

if TYPE_CHECKING:
    from ncr_core.data import Split
    from ncr_core.models import PairwiseRanker
    from ncr_core.training import History, Progress


def register(app: typer.Typer) -> None:
    app.command()(train)


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="The folder to make for the checkpoint.")],
    model: Annotated[
        Literal["nbpr", "dncr", "neupr", "twotower"], typer.Option(help="The model.")
    ] = "neupr",
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
    loss: Annotated[
        Literal["bce", "bpr", "listwise"],
        typer.Option(help="Eq. 15, eq. 3, or the positive against all its negatives at once."),
    ] = "bce",
    l2: Annotated[float, typer.Option(help="λ on the embeddings of each batch.")] = 0.0,
    dropout: Annotated[float, typer.Option(help="Of user vectors, in training.")] = 0.0,
    shared_negatives: Annotated[
        int, typer.Option(help="So many items compared with all of a batch's positives; 0: not.")
    ] = 0,
    start: Annotated[
        Literal["random", "spectral", "als"],
        typer.Option(
            help="Where embeddings begin; `spectral`: leading singular vectors; `als`: the factors "
            "of implicit ALS (nbpr)."
        ),
    ] = "random",
    users: Annotated[
        Literal["free", "history"],
        typer.Option(help="A user's embedding: its own, or pooled from the user's items."),
    ] = "free",
    window: Annotated[
        list[int] | None,
        typer.Option(help="What `history` pools: the latest so many, 0 for all; repeatable."),
    ] = None,
    item_bias: Annotated[bool, typer.Option("--item-bias", help="With item biases.")] = False,
    learn_weights: Annotated[
        bool,
        typer.Option("--learn-weights/--fixed-weights", help="Fixed, and loss bpr: BPR-MF."),
    ] = True,
    shared_embeddings: Annotated[
        bool, typer.Option("--shared-embeddings", help="neupr by eq. 24.")
    ] = False,
    shared_towers: Annotated[
        bool, typer.Option("--shared-towers", help="twotower with one set of hidden layers.")
    ] = False,
    protocol: Annotated[
        Literal["p1", "p2"],
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
    from ncr_core.errors import CheckpointError, TrainingError
    from ncr_core.experiments.datasets import check_rankable
    from ncr_core.models import ModelConfig
    from ncr_core.training import TrainConfig, train_model
    from ncr_core.training.pretraining import refit_config

    if out.exists():  # before an hour of training is spent
        raise CheckpointError(f"{out} exists already; a checkpoint is never overwritten")
    model_config = ModelConfig(
        kind=model,
        factors=factors,
        layers=layers,
        activation=activation,
        init=init,
        learn_weights=learn_weights,
        shared_embeddings=shared_embeddings,
        shared_towers=shared_towers,
        users=users,
        windows=tuple(window or (0,)),
        item_bias=item_bias,
    )
    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        negatives=negatives,
        shared_negatives=shared_negatives,
        start=start,
        learning_rate=learning_rate,
        schedule=schedule,
        loss=loss,
        l2=l2,
        dropout=dropout,
        stopping=stopping,
        pretrain=pretrain,
        alpha=alpha,
        seed=seed,
        device=device,
    )
    config.torch_device()
    columns = columns_of(user_column, item_column, rating_column, timestamp_column)
    if protocol == "p2":
        min_interactions = 1
        split: Split = published(data)
    else:
        split = leave_latest_out(read_interactions(data, format_, columns, min_interactions))
    check_rankable(split)
    started = time.perf_counter()

    def save(trained_model: PairwiseRanker, history: list[History]) -> dict[str, float]:
        last, chosen = history[-1], history[-1].best_epoch - 1
        validation = {"hr": last.hr[chosen], "ndcg": last.ndcg[chosen]} if last.ndcg else {}
        save_checkpoint(
            out,
            trained_model,
            user_ids=split.train.user_ids,
            item_ids=split.train.item_ids,
            item_counts=split.train.item_counts(),
            metrics={"validation": validation},
            training={
                "config": config.as_dict(),
                "seconds": round(time.perf_counter() - started, 1),
                "history": [vars(phase) for phase in history],
                "refit": refit,
            },
            data={
                "name": data.name,
                "protocol": "leave-latest-out" if protocol == "p1" else protocol,
                "min_interactions": min_interactions,
                **counts(split.all_seen),
            },
        )
        return validation

    with EpochLines() as lines:

        def on_progress(progress: Progress) -> None:
            lines.show(vars(progress))

        try:
            trained = train_model(model_config, config, split, on_progress)
        except TrainingError as error:
            if error.model is None or error.model.config != model_config:
                raise
            save(error.model, [error.history])
            raise TrainingError(f"{error}; {out} holds the last good epoch") from None
        history = trained.history
        if refit:
            again = refit_config(model_config, config, history)
            whole = split.with_validation_in_train()
            trained = train_model(model_config, again, whole, on_progress)
    seconds = time.perf_counter() - started
    validation = save(trained.model, history)
    typer.echo(f"trained in {seconds:.0f} s, validation NDCG@10 {validation['ndcg']:.4f}: {out}")
