"""The pipeline of a training: split → start → train → evaluate → gate → checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.jobs.schemas import TrainParams
from app.training.gate import IncumbentComparison, gate_report
from app.training.progress import TRAIN, ProgressReporter, Report
from app.training.reader import Retry
from app.training.warm_start import choose_start, warm_recipe
from ncr_core.checkpoint import save_checkpoint
from ncr_core.comparison.evaluation_snapshot import pack_evaluation_snapshot
from ncr_core.data import Interactions, min_interactions
from ncr_core.data.splits import Split, hold_out_users
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.calibration import calibrate
from ncr_core.evaluation.protocols import (
    Metrics,
    ModelRanks,
    Ranks,
    evaluate_full,
    evaluate_sampled,
    of_random_users,
    sampled_candidates,
)
from ncr_core.manifest import manifest_checksum
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.parameters import parameters_of
from ncr_core.recipes import AUTO_RECIPE, auto_recipes, recipe
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import train_model
from ncr_core.training.pretraining import learn_everything
from ncr_core.training.selection import TriedRecipe, default_budget, select_recipe
from ncr_core.training.warm_start import train_warm

FULL_RANKING_USERS = 1_000  # the whole catalogue for more users would take longer than training
BASELINE_FACTORS = 32
ONCE = Retry(0.0)
MAX_BASELINE_INTERACTIONS = 5_000_000  # of which the baselines take some 20 s


def train_and_evaluate(
    interactions: Interactions,
    params: TrainParams,
    device: str,
    folder: Path,
    report: Report,
    comparison: IncumbentComparison | None = None,
    expected_seconds: Mapping[str, float] | None = None,
    budget_seconds: float | None = None,
    retry: Retry = ONCE,
) -> dict[str, Any]:
    """Trains a model, compares it with the served one and writes its checkpoint.

    Args:
        interactions: What to learn from.
        params: The job's parameters.
        device: The device to train on, or ``auto``.
        folder: Where the checkpoint is written.
        report: Receives progress reports.
        comparison: What the gate compares the model with; by default with the popularity list.
        expected_seconds: Seconds that each phase of an earlier training took.
        budget_seconds: For the choice of the recipe ``auto``; see `select_recipe`.
        retry: How long the checkpoint is written again while its folder cannot be written.

    Returns:
        The summary that the worker publishes the model by.

    Raises:
        CheckpointError: The checkpoint could not be written.
    """
    if params.min_interactions > 1:
        interactions = min_interactions(interactions, params.min_interactions)
    held_out, snapshot_users = hold_out_users(interactions)
    chosen = None if params.recipe == AUTO_RECIPE else params.configured_recipe(device=device)
    wanted = None if chosen is None else chosen.model
    start = choose_start(params, wanted, interactions, held_out, comparison)
    split = start.split

    choice_seconds = 0.0
    if chosen is None and start.base is None:
        last = (expected_seconds or {}).get(TRAIN)
        choice_seconds = last or budget_seconds or default_budget(split.train.nnz)
    progress = ProgressReporter(report, expected_seconds, choice_seconds)
    tried: list[TriedRecipe] = []
    if start.base is not None:
        chosen = chosen or warm_recipe(start.base, device=device, seed=params.random_seed)
        trained = train_warm(start.base, chosen.training, split, progress.epoch)
    elif chosen is not None:
        trained = train_model(chosen.model, chosen.training, split, progress.epoch)
    else:
        selection = select_recipe(
            split,
            budget_seconds=budget_seconds,
            device=device,
            seed=params.random_seed,
            on_progress=progress.epoch,
        )
        chosen, trained, tried = selection.recipe, selection.trained, selection.tried

    progress.phase("evaluate")
    metrics = evaluate(trained.model, split)
    metrics["baselines"] = evaluate_baselines(split, device, params.random_seed)
    calibration = calibrate(trained.model, split)
    if calibration is not None:
        metrics["calibration"] = calibration.figures()
    metrics["start"] = start.report
    metrics["recipe"] = chosen.name
    if tried:
        metrics["tried"] = [each.as_dict() for each in tried]
    metrics["gate"] = gate_report(
        split, interactions, trained.model, comparison, progress, force=params.force
    ) | {"over_popularity": over_popularity(metrics)}

    # What the next training is compared with: the model before it learns what is held out.
    rows = np.flatnonzero(snapshot_users)
    evaluated = pack_evaluation_snapshot(
        trained.model, rows, np.stack([split.test[rows], split.validation[rows]], axis=1)
    )
    progress.phase("learn the held-out items")
    warm = start.base is not None
    model = learn_everything(chosen, trained, split, interactions, warm=warm)
    progress.phase("write checkpoint")
    metrics["seconds"] = progress.seconds
    save = partial(
        save_checkpoint,
        folder,
        model,
        user_ids=split.train.user_ids,
        item_ids=split.train.item_ids,
        item_counts=interactions.item_counts(),
        metrics=metrics,
        calibration=None if calibration is None else calibration.as_dict(),
        training={
            "config": chosen.training.as_dict(),
            "history": [vars(history) for history in trained.history],
        },
        evaluated=evaluated,
    )
    retry.write(folder.parent, save)
    progress.end()
    return {
        "checksum": manifest_checksum(folder),
        "architecture": {
            spec.public_name: getattr(model.config, spec.name)
            for spec in parameters_of(ModelConfig)
            if spec.parameter.request is not None
        },
        "users": interactions.n_users,
        "items": interactions.n_items,
        "interactions": interactions.nnz,
        "metrics": metrics,
    }


def evaluate(model: PairwiseRanker, split: Split) -> dict[str, Any]:
    """HR@10 and NDCG@10 of the model and of the popularity list, sampled and full ranking."""
    popularity = _evaluate(Popularity(split.train), split)
    return _evaluate(ModelRanks(model), split) | {
        f"popularity_{protocol}": figures for protocol, figures in popularity.items()
    }


def evaluate_baselines(split: Split, device: str, seed: int) -> dict[str, Any]:
    """HR@10 and NDCG@10 over the whole catalogue of models that take seconds to fit.

    They are implicit ALS and the linear next-item model, on the users of `evaluate`. One that
    cannot be fitted to the data is left out.
    """
    train = split.train
    if train.nnz > MAX_BASELINE_INTERACTIONS:
        return {}
    closed = auto_recipes(train.n_users, train.n_items, train.nnz)[0]
    fitted = {"als": recipe("als-nbpr").with_(factors=BASELINE_FACTORS), "next-item": closed}
    figures = {}
    for name, each in fitted.items():
        start = each.with_(epochs=0, validation="sampled", device=device, seed=seed)
        nothing = np.full_like(split.validation, -1)
        with contextlib.suppress(ConfigError, DataError):
            unvalidated = replace(split, validation=nothing)
            model = train_model(start.model, start.training, unvalidated).model
            figures[name] = _figures(_evaluate_full(ModelRanks(model), split))
    return figures


def _evaluate(ranks: Ranks, split: Split) -> dict[str, Any]:
    sampled = evaluate_sampled(ranks, sampled_candidates(split, split.test, seed=0))
    return {"sampled": _figures(sampled), "full": _figures(_evaluate_full(ranks, split))}


def _evaluate_full(ranks: Ranks, split: Split) -> Metrics:
    return evaluate_full(ranks, split, of_random_users(split.test, FULL_RANKING_USERS), seed=0)


def _figures(metrics: Metrics) -> dict[str, Any]:
    return {
        "hr@10": round(metrics.hr, 5),
        "ndcg@10": round(metrics.ndcg, 5),
        "users": metrics.users,
        "items": metrics.items,
    }


def over_popularity(metrics: dict[str, Any]) -> dict[str, float]:
    """By how much the model's NDCG@10 exceeds the popularity list's, by protocol."""
    return {
        protocol: round(
            metrics[protocol]["ndcg@10"] - metrics[f"popularity_{protocol}"]["ndcg@10"], 5
        )
        for protocol in ("sampled", "full")
    }
