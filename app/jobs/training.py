"""What a training job does with the events: from a snapshot to a checkpoint and its metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.events.snapshot import EventSnapshot
from app.events.verdicts import Verdicts, standing, verdicts
from app.jobs.gate import Comparison, gate
from app.jobs.progress import Clock, Report
from app.jobs.schemas import TrainParams
from app.jobs.starting import start_of
from ncr_core.checkpoint import save_checkpoint
from ncr_core.data import Interactions, min_interactions
from ncr_core.data.hold_out import hold_out_users
from ncr_core.data.interactions import BoolArray, FloatArray, IntArray
from ncr_core.data.splits import Split
from ncr_core.data.stated import Stated
from ncr_core.errors import DataError
from ncr_core.evaluated import pack_evaluated
from ncr_core.evaluation.calibration import calibrate
from ncr_core.evaluation.protocols import (
    Metrics,
    ModelRanks,
    Ranks,
    evaluate_full,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.manifest import manifest_checksum
from ncr_core.models import ModelConfig
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.loop import learn_held_out
from ncr_core.training.warm import train_warm

HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST = 0.2, 1_000, 10_000
WINDOWS = (1, 2, 4, 8, 16, 64, 0)  # latest items that a user's vector is pooled from, 0 for all
SHARED_NEGATIVES = 512
FULL_RANKING_USERS = 1_000  # the whole catalogue for more users would take longer than training


def interactions_of(
    snapshot: EventSnapshot, user_ids: dict[int, str], item_ids: dict[int, str]
) -> Interactions:
    """The matrix of a snapshot: what is positive, and what else users did and said beside it.

    Of a user's events about an item the last word counts, see `verdicts`. Items that have no name
    in ``item_ids`` are left out, and so are users of whom there is nothing to learn.
    """
    if len(snapshot) == 0:
        raise DataError("there are no events to learn from: post some to /events, or import a file")
    named = np.fromiter(item_ids, np.int64, len(item_ids))
    known = np.isin(snapshot.item_id, named)
    if not known.any():
        raise DataError("no event is about an item that may be recommended")
    events = np.stack([snapshot.user_id[known], snapshot.item_id[known]], axis=1)
    found = _verdicts(events, snapshot.weight[known])
    if len(found.liked) == 0:
        raise DataError("no event is positive by NCR_FEEDBACK: there is nothing to learn from")
    liked, disliked, seen = events[found.liked], events[found.disliked], events[found.only_seen]
    told = np.isin(snapshot.preferences[:, 1:3], named).all(axis=1)
    pairs, pair_weights = snapshot.preferences[told, :3], snapshot.preference_weight[told]
    stands = standing(pairs)
    pairs, pair_weights = pairs[stands], pair_weights[stands]

    users = np.unique(np.concatenate([liked[:, 0], pairs[:, 0]]))
    items = np.unique(np.concatenate([liked[:, 1], disliked[:, 1], pairs[:, 1:].flatten()]))

    def numbered(rows: IntArray) -> IntArray:
        return np.stack(
            [_row_of(users, rows[:, 0]), *(_row_of(items, column) for column in rows.T[1:])], axis=1
        )

    def all_there(rows: IntArray) -> BoolArray:
        there: BoolArray = np.logical_and.reduce(rows >= 0, axis=1)
        return there

    seen, disliked = numbered(seen), numbered(disliked)
    wanted = all_there(disliked)
    stated = Stated(
        seen[all_there(seen)],
        disliked[wanted],
        found.disliked_weights[wanted],
        numbered(pairs),
        pair_weights,
    )
    user_rows, item_rows = numbered(liked).T
    # A snapshot is in the order of user, time and seq already.
    return Interactions.from_arrays(
        user_rows,
        item_rows,
        user_ids=[user_ids[u] for u in users.tolist()],
        item_ids=[item_ids[i] for i in items.tolist()],
        weights=found.liked_weights if np.ptp(found.liked_weights) > 0 else None,
        stated=stated if len(stated) else None,
    )


def _verdicts(events: IntArray, weights: FloatArray) -> Verdicts:
    """Of (n, 2) users and items; where all say the same, what is liked repeats where it does."""
    if weights[0] > 0 and (weights == weights[0]).all():
        none = np.zeros(0, dtype=np.int64)
        return Verdicts(np.arange(len(events)), weights, none, weights[:0], none)
    items, places = np.unique(events[:, 1], return_inverse=True)
    return verdicts(events[:, 0] * len(items) + places, weights)


def _row_of(ids: IntArray, wanted: IntArray) -> IntArray:
    """Where each stands in ascending ids; −1 for what is not there."""
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[at] == wanted, at, -1)


def model_config_of(params: TrainParams) -> ModelConfig:
    """The model that a whole order asks for; `windows` of `history` as docs/experiments.md."""
    kind, factors = params.model or "neupr", params.factors or 8
    if params.users != "history":
        return ModelConfig(kind, factors, params.layers)
    return ModelConfig(
        kind,
        factors,
        params.layers,
        users="history",
        windows=WINDOWS,
        item_bias=kind != "dncr",
    )


def train_config_of(params: TrainParams, device: str) -> TrainConfig:
    """How it is trained."""
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
    if params.users != "history":
        return config
    shares = params.model == "nbpr" or (params.model == "neupr" and params.pretrain)
    return replace(
        config,
        loss="listwise",
        start="spectral",
        shared_negatives=SHARED_NEGATIVES if shares else 0,
        fine_tune_epochs=2,
    )


def train_and_evaluate(
    interactions: Interactions,
    params: TrainParams,
    model_config: ModelConfig,
    device: str,
    folder: Path,
    report: Report,
    comparison: Comparison | None = None,
    expected: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Trains, measures beside the popularity list and, by ``comparison``, beside what is served,
    and writes the checkpoint; returns a summary.

    ``expected`` are the seconds of an earlier training's phases, for the time left.
    """
    if params.min_interactions > 1:
        interactions = min_interactions(interactions, params.min_interactions)
    held_out, copied = hold_out_users(
        interactions, HELD_OUT_SHARE, HELD_OUT_AT_LEAST, HELD_OUT_AT_MOST
    )
    start = start_of(params, model_config, interactions, held_out, comparison)
    split = start.split
    config = train_config_of(params, device)
    clock = Clock(report, expected)
    if start.base is None:
        trained = train_model(model_config, config, split, clock.epoch)
    else:
        trained = train_warm(start.base, config, split, clock.epoch)
    clock.phase("evaluate")
    popular = Popularity(split.train)
    metrics = _measure(ModelRanks(trained.model), split) | {
        f"popularity_{name}": value for name, value in _measure(popular, split).items()
    }
    calibration = calibrate(trained.model, split)
    if calibration is not None:
        metrics["calibration"] = calibration.figures()
    metrics["start"] = start.about
    metrics["gate"] = gate(
        split, interactions, trained.model, comparison, clock, force=params.force
    )
    metrics["gate"]["over_popularity"] = over_popularity(metrics)
    rows = np.flatnonzero(copied)
    both = np.stack([split.test[rows], split.validation[rows]], axis=1)
    evaluated = pack_evaluated(trained.model, rows, both)
    clock.phase("learn the held-out items")
    learn_held_out(trained.model, interactions, config)
    clock.phase("write checkpoint")
    metrics["seconds"] = clock.seconds
    save_checkpoint(
        folder,
        trained.model,
        user_ids=split.train.user_ids,
        item_ids=split.train.item_ids,
        item_counts=interactions.item_counts(),
        metrics=metrics,
        calibration=None if calibration is None else calibration.as_dict(),
        training={
            "config": config.as_dict(),
            "history": [vars(history) for history in trained.history],
        },
        evaluated=evaluated,
    )
    clock.end()
    return {
        "checksum": manifest_checksum(folder),
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
        "metrics": metrics,
    }


def _measure(model: Ranks, split: Split) -> dict[str, Any]:
    sampled = evaluate_sampled(model, sampled_candidates(split, split.test, seed=0))
    some = split.test.copy()
    some[np.flatnonzero(some >= 0)[FULL_RANKING_USERS:]] = -1
    full = evaluate_full(model, split, some, seed=0)
    return {"sampled": _rounded(sampled), "full": _rounded(full)}


def over_popularity(metrics: dict[str, Any]) -> dict[str, float]:
    """What the model's NDCG@10 is above the popularity list's, by protocol."""
    return {
        name: round(metrics[name]["ndcg@10"] - metrics[f"popularity_{name}"]["ndcg@10"], 5)
        for name in ("sampled", "full")
    }


def _rounded(metrics: Metrics) -> dict[str, float | int]:
    return {
        "hr@10": round(metrics.hr, 5),
        "ndcg@10": round(metrics.ndcg, 5),
        "users": metrics.users,
        "items": metrics.items,
    }
