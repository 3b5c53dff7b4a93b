"""What a training job does with the events: from a snapshot to a checkpoint and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.events.snapshot import EventSnapshot
from app.jobs.schemas import TrainParams
from ncr_core.checkpoint import manifest_checksum, save_checkpoint
from ncr_core.data import Interactions, leave_latest_out, min_interactions
from ncr_core.data.splits import Split, some_users
from ncr_core.errors import DataError
from ncr_core.evaluation.protocols import (
    Metrics,
    ModelRanks,
    Ranks,
    evaluate_full,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.models import ModelConfig
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.training import Progress, TrainConfig, train_model
from ncr_core.training.loop import learn_held_out

HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST = 0.2, 1_000, 10_000
FULL_RANKING_USERS = 1_000  # the whole catalogue for more users would take longer than training

Report = Callable[[dict[str, Any]], None]


def interactions_of(
    snapshot: EventSnapshot, user_ids: dict[int, str], item_ids: dict[int, str]
) -> Interactions:
    """The matrix of a snapshot. Items that have no name in ``item_ids`` are left out."""
    if len(snapshot) == 0:
        raise DataError("there are no events to learn from: post some to /events, or import a file")
    known = np.isin(snapshot.item_id, np.fromiter(item_ids, np.int64, len(item_ids)))
    if not known.any():
        raise DataError("no event is about an item that may be recommended")
    users, user_rows = np.unique(snapshot.user_id[known], return_inverse=True)
    items, item_rows = np.unique(snapshot.item_id[known], return_inverse=True)
    # A snapshot is in the order of user, time and seq already.
    return Interactions.from_arrays(
        user_rows,
        item_rows,
        user_ids=[user_ids[u] for u in users.tolist()],
        item_ids=[item_ids[i] for i in items.tolist()],
    )


def train_and_evaluate(
    interactions: Interactions,
    params: TrainParams,
    model_config: ModelConfig,
    device: str,
    folder: Path,
    report: Report,
) -> dict[str, Any]:
    """Trains, measures beside the popularity list, writes the checkpoint; returns a summary."""
    if params.min_interactions > 1:
        interactions = min_interactions(interactions, params.min_interactions)
    split = leave_latest_out(interactions, _held_out_users(interactions, params.seed))
    config = TrainConfig(
        epochs=params.epochs,
        batch_size=params.batch_size,
        negatives=params.negatives,
        learning_rate=params.learning_rate,
        pretrain=params.pretrain,
        alpha=params.alpha,
        seed=params.seed,
        device=device,
    )

    def on_progress(progress: Progress) -> None:
        report(
            {
                "phase": progress.phase,
                "epoch": progress.epoch,
                "epochs": progress.epochs,
                "loss": round(progress.loss, 5),
                "ndcg": None if progress.ndcg is None else round(progress.ndcg, 5),
                "eta_s": round(progress.eta_s, 1),
            }
        )

    trained = train_model(model_config, config, split, on_progress)
    report(stage("evaluate"))
    popular = Popularity(split.train)
    metrics = _measure(ModelRanks(trained.model), split) | {
        f"popularity_{name}": value for name, value in _measure(popular, split).items()
    }
    report(stage("learn the held-out items"))
    learn_held_out(trained.model, interactions, config)
    report(stage("write checkpoint"))
    save_checkpoint(
        folder,
        trained.model,
        user_ids=split.train.user_ids,
        item_ids=split.train.item_ids,
        item_counts=interactions.item_counts(),
        metrics=metrics,
        training={
            "config": config.as_dict(),
            "history": [vars(history) for history in trained.history],
        },
    )
    return {
        "checksum": manifest_checksum(folder),
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
        "metrics": metrics,
    }


def stage(phase: str) -> dict[str, Any]:
    """The progress of a phase that has no epochs."""
    return {"phase": phase, "epoch": 0, "epochs": 0, "loss": None, "ndcg": None, "eta_s": None}


def _held_out_users(interactions: Interactions, seed: int) -> np.ndarray:
    mask = some_users(interactions, HELD_OUT_SHARE, HELD_OUT_AT_LEAST, seed)
    mask[np.flatnonzero(mask)[HELD_OUT_AT_MOST:]] = False
    return mask


def _measure(model: Ranks, split: Split) -> dict[str, Any]:
    sampled = evaluate_sampled(model, sampled_candidates(split, split.test, seed=0))
    some = split.test.copy()
    some[np.flatnonzero(some >= 0)[FULL_RANKING_USERS:]] = -1
    full = evaluate_full(model, split, some, seed=0)
    return {"sampled": _rounded(sampled), "full": _rounded(full)}


def _rounded(metrics: Metrics) -> dict[str, float | int]:
    return {
        "hr@10": round(metrics.hr, 5),
        "ndcg@10": round(metrics.ndcg, 5),
        "users": metrics.users,
        "items": metrics.items,
    }
