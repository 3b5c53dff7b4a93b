"""The pipeline of a training: split → start → train → evaluate → gate → checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.jobs.schemas import TrainParams
from app.training.descriptions import Descriptions, report_of
from app.training.gate import (
    IncumbentComparison,
    ServingModel,
    ServingModelReadError,
    gate_report,
)
from app.training.progress import TRAIN, ProgressReporter, Report
from app.training.reader import Retry
from ncr_core.checkpoint import save_checkpoint
from ncr_core.comparison import FULL_USERS, leaked_users
from ncr_core.content import ContentMaps
from ncr_core.data import Interactions, leave_latest_out, min_interactions
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split, hold_out_users
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.calibration import calibrate
from ncr_core.evaluation.metrics import FloatArray, ndcg_of_each
from ncr_core.evaluation.protocols import (
    FullRanking,
    K,
    Metrics,
    ModelRanks,
    evaluate_full,
    evaluate_sampled,
    full_ranks,
    of_random_users,
    sampled_candidates,
)
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.parameters import parameters_of
from ncr_core.recipes import (
    AUTO_RECIPE,
    CLOSED_FORM_FACTORS,
    SMALL_DATA,
    Recipe,
    auto_recipes,
    recipe,
)
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.training import train_model
from ncr_core.training.pretraining import evaluation_snapshot, learn_everything
from ncr_core.training.rank_engine import RankEngine
from ncr_core.training.selection import TriedRecipe, default_budget, select_recipe
from ncr_core.training.warm_start import (
    StartingPoint,
    evaluated_starting_point,
    train_warm,
)

BASELINE_FACTORS = 32
ONCE = Retry(0.0)
MAX_BASELINE_INTERACTIONS = 5_000_000  # of which the baselines take some 20 s
MIN_HELD_OUT_SHARE = 0.5  # of the held-out users that have to be left to evaluate a warm start


@dataclass(frozen=True)
class TrainingStart:
    """The split to train on, and the model to start from."""

    split: Split
    base: StartingPoint | None
    """None for a training from scratch."""
    report: dict[str, Any]
    """The start of the training and the reason, for the model's metrics."""


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
    engine: RankEngine | None = None,
    descriptions: Descriptions | None = None,
) -> dict[str, Any]:
    """Trains a model, compares the model with the served model and writes a checkpoint.

    Args:
        interactions: The interactions to learn from.
        params: The job's parameters.
        device: The device to train on, or ``auto``.
        folder: The folder of the checkpoint.
        report: Receives progress reports.
        comparison: The gate's comparison with the served model; by default the gate compares with
            the popularity list.
        expected_seconds: Seconds that each phase of an earlier training took.
        budget_seconds: The time for the choice of the recipe ``auto``; see `select_recipe`.
        retry: Retries writing the checkpoint while the folder cannot be written.
        engine: Trains the phases that have epochs, and ranks whole catalogues, by several
            processes; None: this process does.
        descriptions: The attributes of items and users; None for a training without attributes.

    Returns:
        The summary with which the worker publishes the model.

    Raises:
        CheckpointError: The checkpoint could not be written.
        ConfigError: The engine cannot train such a model.
    """
    chosen = None if params.recipe == AUTO_RECIPE else params.configured_recipe(device=device)
    wanted = None if chosen is None else chosen.model
    if params.min_interactions > 1:
        interactions = min_interactions(interactions, params.min_interactions)
    held_out, snapshot_users = hold_out_users(interactions)
    if comparison is not None:
        comparison.read_users(interactions, held_out)
    # The times, which `learn_gaps` alone needs, stay out of the copies that are trained on.
    untimed = replace(interactions, times=None)
    split = leave_latest_out(untimed, held_out)
    start = TrainingStart(split, None, {"from": "scratch"})
    if params.start == "warm":
        start = warm_start(wanted, untimed, split, comparison, engine)
        split = start.split

    choice_seconds = 0.0
    if chosen is None and start.base is None:
        last = (expected_seconds or {}).get(TRAIN)
        choice_seconds = last or budget_seconds or default_budget(split.train)
    progress = ProgressReporter(report, expected_seconds, choice_seconds)
    tried: list[TriedRecipe] = []
    if start.base is not None:
        chosen = chosen or warm_recipe(start.base, device=device, seed=params.random_seed)
        trained = train_warm(start.base, chosen.training, split, progress.epoch, engine)
    elif chosen is not None:
        trained = train_model(
            chosen.model, chosen.training, split, progress.epoch, run_phase=engine
        )
    else:
        selection = select_recipe(
            split,
            budget_seconds=budget_seconds,
            device=device,
            seed=params.random_seed,
            on_progress=progress.epoch,
            run_phase=engine,
        )
        chosen, trained, tried = selection.recipe, selection.trained, selection.tried

    progress.phase("evaluate")
    rank_in_full = full_ranks if engine is None else engine.full_ranks
    metrics, full_ndcg = _evaluate(trained.model, split, device, params.random_seed, rank_in_full)
    calibration = calibrate(trained.model, split)
    if calibration is not None:
        metrics["calibration"] = calibration.figures()
        metrics["reliability"] = calibration.as_dict()["bins"]
    metrics["start"] = start.report
    metrics["recipe"] = chosen.name
    if trained.model.config.start_factors:
        metrics["start_factors"] = trained.model.config.start_factors
    if tried:
        metrics["tried"] = [each.as_dict() for each in tried]
    metrics["gate"] = gate_report(
        split,
        interactions,
        trained.model,
        comparison,
        progress,
        full_ndcg,
        force=params.force,
        rank_in_full=rank_in_full,
    ) | {"over_popularity": _over_popularity(metrics)}

    # What the next training is compared with: the model before it learns what is held out.
    rows = np.flatnonzero(snapshot_users)
    evaluated = evaluation_snapshot(
        trained.model, rows, np.stack([split.test[rows], split.validation[rows]], axis=1)
    )
    progress.phase("learn the held-out items")
    warm = start.base is not None
    model = learn_everything(chosen, trained, split, interactions, warm=warm, run_phase=engine)
    content = ContentMaps()
    if descriptions is not None:
        progress.phase("learn from attributes")
        content = descriptions.maps(model, interactions)
        metrics["content"] = report_of(content)
    progress.phase("write checkpoint")
    metrics["seconds"] = progress.seconds
    metrics["curve"] = progress.curve
    save = partial(
        save_checkpoint,
        folder,
        model,
        user_ids=split.train.user_ids[: model.n_users],
        item_ids=split.train.item_ids,
        item_counts=interactions.item_counts(),
        metrics=metrics,
        calibration=None if calibration is None else calibration.as_dict(),
        training={
            "config": chosen.training.as_dict(),
            "history": [vars(history) for history in trained.history],
        },
        evaluated=evaluated,
        content=content,
        trained_users=interactions.n_users,
    )
    checksum = retry.write(folder.parent, save)
    progress.end()
    return {
        "checksum": checksum,
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


def _evaluate(
    model: PairwiseRanker, split: Split, device: str, seed: int, rank_in_full: FullRanking
) -> tuple[dict[str, Any], tuple[FloatArray, FloatArray]]:
    """HR@10 and NDCG@10 of the model, of the popularity list and of two baselines.

    The model and the list have sampled and full ranking, and the baselines have full ranking alone.

    Returns:
        The metrics, and (n,) NDCG@10 by user in full ranking of the model and of the list.
    """
    held_out = of_random_users(split.test, FULL_USERS)
    candidates = sampled_candidates(split, split.test, seed=0)
    metrics: dict[str, Any] = {}
    by_user = []
    for prefix, ranks in (
        ("", VectorRanks.as_trained(model, candidates.users)),
        ("popularity_", Popularity(split.train)),
    ):
        metrics[f"{prefix}sampled"] = _figures(evaluate_sampled(ranks, candidates))
        positions, items = rank_in_full(ranks, split, held_out, 0)
        metrics[f"{prefix}full"] = _figures(Metrics.of(positions, items))
        by_user.append(ndcg_of_each(positions, K))
    metrics["baselines"] = _evaluate_baselines(split, held_out, device, seed)
    return metrics, (by_user[0], by_user[1])


def _evaluate_baselines(split: Split, held_out: IntArray, device: str, seed: int) -> dict[str, Any]:
    """HR@10 and NDCG@10 over the whole catalogue of models that take seconds to fit.

    The models are implicit ALS and the linear next-item model, on the users of `_evaluate`. A model
    that cannot be fitted to the data is left out. Data with more than
    ``MAX_BASELINE_INTERACTIONS`` interactions have no baselines.
    """
    train = split.train
    if train.nnz > MAX_BASELINE_INTERACTIONS:
        return {}
    closed = auto_recipes(train.n_users, train.n_items, train.nnz, False, train.remembered)[0]
    if train.nnz > SMALL_DATA:
        closed = closed.with_(factors=min(closed.model.factors, CLOSED_FORM_FACTORS))
    fitted = {"als": recipe("als-nbpr").with_(factors=BASELINE_FACTORS), "next-item": closed}
    figures = {}
    for name, each in fitted.items():
        start = each.with_(epochs=0, validation="sampled", device=device, seed=seed)
        nothing = np.full_like(split.validation, -1)
        with contextlib.suppress(ConfigError, DataError):
            unvalidated = replace(split, validation=nothing)
            model = train_model(start.model, start.training, unvalidated).model
            figures[name] = _figures(evaluate_full(ModelRanks(model), split, held_out, seed=0))
    return figures


def _figures(metrics: Metrics) -> dict[str, Any]:
    return {
        "hr@10": round(metrics.hr, 5),
        "ndcg@10": round(metrics.ndcg, 5),
        "users": metrics.users,
        "items": metrics.items,
    }


def _over_popularity(metrics: dict[str, Any]) -> dict[str, float]:
    """The model's NDCG@10 minus the popularity list's NDCG@10, by protocol."""
    return {
        protocol: round(
            metrics[protocol]["ndcg@10"] - metrics[f"popularity_{protocol}"]["ndcg@10"], 5
        )
        for protocol in ("sampled", "full")
    }


def warm_start(
    config: ModelConfig | None,
    interactions: Interactions,
    split: Split,
    comparison: IncumbentComparison | None,
    engine: RankEngine | None = None,
) -> TrainingStart:
    """Starts from the served model if possible.

    Users whose held-out items the served model has learned leave the hold-out, because the new
    model's metrics would be too good.

    Args:
        config: The new model's configuration; None: the served model's configuration.
        interactions: All interactions.
        split: All interactions, with items held out.
        comparison: Loads the served model.
        engine: The ranks that train, if there are several.
    """
    try:
        loaded = None if comparison is None else comparison.load(interactions, split.test >= 0)
    except ServingModelReadError as error:
        return _from_scratch(split, f"the served model cannot be read: {error}")
    if loaded is None:
        return _from_scratch(split, "no model is served")
    serving, incumbent = loaded
    version, evaluated, checkpoint = serving.version, serving.evaluated, serving.checkpoint
    if config and (differences := _differences(checkpoint.model.config, config)):
        return _from_scratch(split, f"the served model {version} has {differences}")
    if engine is not None:
        try:
            engine.check(checkpoint.model.config)
        except ConfigError as error:
            return _from_scratch(split, f"the ranks cannot train the served model: {error}")
    if unknown := _unknown(serving, interactions):
        return _from_scratch(split, f"{version} knows none of these {unknown}")
    if evaluated is None:
        return _from_scratch(split, f"{version} has learned all possible held-out items")
    users = split.test >= 0
    held_out = users & ~leaked_users(split, incumbent)
    if held_out.sum() < MIN_HELD_OUT_SHARE * users.sum():
        return _from_scratch(split, f"{version} has learned most of the current held-out items")
    base = evaluated_starting_point(
        checkpoint.model, evaluated, checkpoint.user_ids, checkpoint.item_ids
    )
    split = leave_latest_out(interactions, held_out)
    return TrainingStart(split, base, {"from": "warm", "version": version})


def warm_recipe(base: StartingPoint, **overrides: Any) -> Recipe:
    """The recipe of a warm start from a model; ``overrides`` replace training parameters."""
    config = base.model.config
    name: str = config.users
    if config.by_length and config.kind == "nbpr":
        by_layers = ("next-item-nbpr", "next-item-attention", "next-item-two-layer-attention")
        name = by_layers[min(config.attention_layers, 2)]
    named = recipe("default" if name == "free" else name)
    return Recipe("warm", config, replace(named.training, **overrides))


def _differences(serving: ModelConfig, wanted: ModelConfig) -> str:
    """The differences in the parameters that a request may give, as text.

    In all other parameters, a warm start keeps the served model's values.
    """
    pairs = {
        spec.name: (getattr(serving, spec.name), getattr(wanted, spec.name))
        for spec in parameters_of(ModelConfig)
        if spec.parameter.request is not None
    }
    return "; ".join(f"{name} {old}, not {new}" for name, (old, new) in pairs.items() if old != new)


def _unknown(serving: ServingModel, interactions: Interactions) -> str:
    """The kind of rows that the served model does not know at all: ``items``, ``users`` or none."""
    checkpoint = serving.checkpoint
    if set(interactions.item_ids).isdisjoint(checkpoint.item_ids):
        return "items"
    if checkpoint.model.config.users != "free":
        return ""
    return "users" if set(interactions.user_ids).isdisjoint(checkpoint.user_ids) else ""


def _from_scratch(split: Split, reason: str) -> TrainingStart:
    return TrainingStart(split, None, {"from": "scratch", "because": reason})
