"""Where a training starts: from scratch, or from the parameters of the served model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from app.jobs.schemas import TrainParams
from app.training.gate import IncumbentComparison, ServingModel, ServingModelReadError
from ncr_core.comparison.fair_holdout import leaked_users
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.interactions import BoolArray
from ncr_core.data.splits import Split
from ncr_core.models import ModelConfig
from ncr_core.parameters import parameters_of
from ncr_core.recipes import Recipe, recipe
from ncr_core.training.warm_start import StartingPoint, evaluated_starting_point

MIN_HELD_OUT_SHARE = 0.5  # of the held-out users that have to be left to evaluate a warm start


@dataclass(frozen=True)
class TrainingStart:
    """The split to train on, and the model to start from."""

    split: Split
    base: StartingPoint | None
    """None for a training from scratch."""
    report: dict[str, Any]
    """Where the training starts and why, for the model's metrics."""


def choose_start(
    params: TrainParams,
    config: ModelConfig | None,
    interactions: Interactions,
    held_out: BoolArray,
    comparison: IncumbentComparison | None,
) -> TrainingStart:
    """Splits the interactions, and starts warm if that is wanted and possible.

    Nothing is held out that the served model has learned: the new model's metrics would be too
    good.

    Args:
        params: Their ``start`` is ``warm`` or ``scratch``.
        config: The new model's; None: whatever the served model's is.
        interactions: All interactions.
        held_out: (n_users,) mask of the users to hold items out of.
        comparison: How to load the served model.
    """
    split = leave_latest_out(interactions, held_out)
    if params.start != "warm":
        return TrainingStart(split, None, {"from": "scratch"})
    try:
        serving = None if comparison is None else comparison.serving_model()
    except ServingModelReadError as error:
        return _from_scratch(split, f"the model that is served cannot be read: {error}")
    if serving is None or comparison is None:
        return _from_scratch(split, "no model is served")
    version, evaluated, checkpoint = serving.version, serving.evaluated, serving.checkpoint
    if config and (differences := _differences(checkpoint.model.config, config)):
        return _from_scratch(split, f"the model that is served, {version}, has {differences}")
    if unknown := _unknown(serving, interactions):
        return _from_scratch(split, f"{version} knows none of these {unknown}")
    if evaluated is None:
        return _from_scratch(split, f"{version} has learned all that could be held out")
    incumbent = serving.incumbent(interactions, split.test >= 0, comparison.events)
    held_out = held_out & ~leaked_users(split, incumbent)
    if held_out.sum() < MIN_HELD_OUT_SHARE * (split.test >= 0).sum():
        return _from_scratch(split, f"{version} has learned most of what is held out now")
    base = evaluated_starting_point(
        checkpoint.model, evaluated, checkpoint.user_ids, checkpoint.item_ids
    )
    split = leave_latest_out(interactions, held_out)
    return TrainingStart(split, base, {"from": "warm", "version": version})


def warm_recipe(base: StartingPoint, **overrides: Any) -> Recipe:
    """How a model goes on that a choice among recipes once began; ``overrides`` are of training."""
    config = base.model.config
    name = "next-item-nbpr" if config.by_length and config.kind == "nbpr" else config.users
    named = recipe("default" if name == "free" else name)
    return Recipe("warm", config, replace(named.training, **overrides))


def _differences(serving: ModelConfig, wanted: ModelConfig) -> str:
    """In what a request may say; in all else a warm start goes on as the served model is."""
    pairs = {
        spec.name: (getattr(serving, spec.name), getattr(wanted, spec.name))
        for spec in parameters_of(ModelConfig)
        if spec.parameter.request is not None
    }
    return "; ".join(f"{name} {old}, not {new}" for name, (old, new) in pairs.items() if old != new)


def _unknown(serving: ServingModel, interactions: Interactions) -> str:
    """What the served model has no vectors of at all: ``items``, ``users`` or nothing."""
    checkpoint = serving.checkpoint
    if set(interactions.item_ids).isdisjoint(checkpoint.item_ids):
        return "items"
    free = checkpoint.model.config.users == "free"
    known = not set(interactions.user_ids).isdisjoint(checkpoint.user_ids)
    return "users" if free and not known else ""


def _from_scratch(split: Split, reason: str) -> TrainingStart:
    return TrainingStart(split, None, {"from": "scratch", "because": reason})
