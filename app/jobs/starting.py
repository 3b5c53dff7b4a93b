"""Where a training begins: from scratch, or from the model that is served."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.jobs.gate import Comparison
from app.jobs.schemas import TrainParams
from app.jobs.served import ServedModel, Unreadable
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.interactions import BoolArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.frozen import learned_by
from ncr_core.models import ModelConfig
from ncr_core.training.warm import Base, measured_base

LEAST_LEFT = 0.5  # of the held-out users, for the new model's own figures


@dataclass(frozen=True)
class Start:
    """What a training begins with. ``base`` is None for one from scratch; ``about`` says why."""

    split: Split
    base: Base | None
    about: dict[str, Any]


def start_of(
    params: TrainParams,
    config: ModelConfig,
    every: Interactions,
    held_out: BoolArray,
    comparison: Comparison | None,
) -> Start:
    """The split and the model to begin from, as far as it can be begun from.

    Nothing is held out that the base has learned: the new model's figures would be too good.
    """
    split = leave_latest_out(every, held_out)
    if params.start != "warm":
        return Start(split, None, {"from": "scratch"})
    try:
        served = None if comparison is None else comparison.served()
    except Unreadable as error:
        return _scratch(split, f"the model that is served cannot be read: {error}")
    if served is None or comparison is None:
        return _scratch(split, "no model is served")
    if other := _differences(served.checkpoint.model.config, config):
        return _scratch(split, f"the model that is served, {served.version}, has {other}")
    if strange := _strangers(served, every):
        return _scratch(split, f"{served.version} knows none of these {strange}")
    if served.evaluated is None:
        return _scratch(split, f"{served.version} has learned all that could be held out")
    incumbent = served.incumbent(every, split.test >= 0, comparison.earlier)
    held_out = held_out & ~learned_by(split, incumbent)
    if held_out.sum() < LEAST_LEFT * (split.test >= 0).sum():
        return _scratch(split, f"{served.version} has learned most of what is held out now")
    return Start(leave_latest_out(every, held_out), *_warm(served))


def _differences(found: ModelConfig, wanted: ModelConfig) -> str:
    has, asked = asdict(found), asdict(wanted)
    return "; ".join(
        f"{name} {has[name]}, not {asked[name]}" for name in has if has[name] != asked[name]
    )


def _strangers(served: ServedModel, every: Interactions) -> str:
    """What has no vector at all to begin with: users or items."""
    checkpoint = served.checkpoint
    if set(every.item_ids).isdisjoint(checkpoint.item_ids):
        return "items"
    free = checkpoint.model.config.users == "free"
    return "users" if free and set(every.user_ids).isdisjoint(checkpoint.user_ids) else ""


def _warm(served: ServedModel) -> tuple[Base, dict[str, Any]]:
    assert served.evaluated is not None  # noqa: S101 - asked for before
    checkpoint = served.checkpoint
    base = measured_base(
        checkpoint.model, served.evaluated, checkpoint.user_ids, checkpoint.item_ids
    )
    return base, {"from": "warm", "version": served.version}


def _scratch(split: Split, why: str) -> Start:
    return Start(split, None, {"from": "scratch", "because": why})
