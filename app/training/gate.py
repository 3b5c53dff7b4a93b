"""The gate of a training: compares the new model with the served one, and decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.training.dataset import TrainingEvents
from app.training.progress import ProgressReporter
from ncr_core.checkpoint import Checkpoint
from ncr_core.comparison.evaluation_snapshot import EvaluationSnapshot
from ncr_core.comparison.fair_holdout import Incumbent, fair_hold_out
from ncr_core.comparison.gate import DRAWS, FULL_USERS, MIN_USERS, decide, evaluate_both
from ncr_core.data.interactions import BoolArray, Interactions, row_indices
from ncr_core.data.splits import Split
from ncr_core.errors import CheckpointError
from ncr_core.evaluation.metrics import ndcg_of_each
from ncr_core.evaluation.protocols import K, ModelRanks, full_ranks, of_random_users
from ncr_core.evaluation.significance import Evaluation
from ncr_core.models.base import PairwiseRanker
from ncr_core.reproduction.baselines.scoring import Popularity

DIGITS = 5


class ServingModelReadError(CheckpointError):
    """The checkpoint of the served version is damaged or gone."""

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(reason)
        self.version = version


@dataclass(frozen=True)
class ServingModel:
    """The version that was active when it was loaded."""

    version: str
    trained_seq: int
    checkpoint: Checkpoint
    evaluated: EvaluationSnapshot | None
    """The model as it was evaluated; None in checkpoints written before these were kept."""

    def incumbent(
        self, interactions: Interactions, users: BoolArray, events: TrainingEvents
    ) -> Incumbent:
        """The model as the incumbent of a comparison on these users.

        Args:
            interactions: The challenger's data.
            users: (n_users,) mask of its users.
            events: What the data were made of.
        """
        evaluated = self.evaluated
        if evaluated is None:
            # It has learned everything that there was: only newer interactions are fair.
            rows = np.arange(len(self.checkpoint.user_ids))
            evaluated = EvaluationSnapshot(self.checkpoint.model, rows, np.full((len(rows), 2), -1))
        ids = self.checkpoint.user_ids, self.checkpoint.item_ids
        return Incumbent(evaluated, *ids, *events.known_at(interactions, users, self.trained_seq))


@dataclass(frozen=True)
class IncumbentComparison:
    """What a challenger is compared with: the model that is served at that moment."""

    serving_model: Callable[[], ServingModel | None]
    """Loads it; see `TrainingReader.serving_model`."""
    events: TrainingEvents
    margin: float
    """By which share of the incumbent's NDCG@10 the challenger may be worse."""


def gate_report(
    split: Split,
    interactions: Interactions,
    challenger: PairwiseRanker,
    comparison: IncumbentComparison | None,
    progress: ProgressReporter,
    *,
    force: bool,
) -> dict[str, Any]:
    """Decides whether a newly trained model is ``published`` or ``rejected``.

    Args:
        split: What the challenger was trained and evaluated on.
        interactions: What ``split`` was made of.
        challenger: The new model.
        comparison: What it is compared with; None publishes it without a comparison.
        progress: Told of the phase.
        force: Publish whatever the comparison finds.

    Returns:
        The report; its ``decision`` is what happens to the model.
    """
    try:
        serving = None if comparison is None else comparison.serving_model()
    except ServingModelReadError as error:
        # All the more reason to replace it.
        report = _unconditional("incumbent_unreadable", force)
        return report | {"incumbent": error.version, "detail": str(error)}
    if comparison is None or serving is None:
        return _compare_with_popularity(split, challenger, force)
    progress.phase("compare with what is served")
    return _compare(split, interactions, challenger, serving, comparison, force, progress)


def _unconditional(finding: str, force: bool) -> dict[str, Any]:
    return {
        "decision": "published",
        "finding": finding,
        "passed": True,
        "forced": force,
        "incumbent": None,
    }


def _compare_with_popularity(
    split: Split, challenger: PairwiseRanker, force: bool
) -> dict[str, Any]:
    """The report on a first model, which replaces the popularity list.

    It is rejected if it is shown to be worse than that list.
    """
    some = of_random_users(split.test, FULL_USERS)
    if (some >= 0).sum() < MIN_USERS:
        return _unconditional("first", force)
    model_ndcg, popularity_ndcg = (
        ndcg_of_each(full_ranks(ranks, split, some, 0)[0], K)
        for ranks in (ModelRanks(challenger), Popularity(split.train))
    )
    verdict = decide(model_ndcg, popularity_ndcg, 0.0)
    if verdict.finding != "worse":
        return _unconditional("first", force)
    return _unconditional("below_popularity", force) | {
        "decision": "published" if force else "rejected",
        "passed": False,
    }


def _compare(
    split: Split,
    interactions: Interactions,
    challenger: PairwiseRanker,
    serving: ServingModel,
    comparison: IncumbentComparison,
    force: bool,
    progress: ProgressReporter,
) -> dict[str, Any]:
    """The report on a challenger, from both models' metrics on a fair hold-out."""
    incumbent = serving.incumbent(interactions, split.test >= 0, comparison.events)
    hold_out = fair_hold_out(split, incumbent)
    metrics: dict[str, Any] = {}
    verdict = decide(np.zeros(0), np.zeros(0), comparison.margin)
    if len(hold_out.users) >= MIN_USERS:
        measured = evaluate_both(hold_out, challenger, incumbent, on_done=progress.step)
        verdict = measured.decide(comparison.margin)
        full = measured.full_challenger, measured.full_incumbent
        sampled = measured.challenger, measured.incumbent
        metrics = {
            "decided_by": verdict.protocol,
            "hr@10": _means(full if verdict.protocol == "full" else sampled)["hr@10"],
            "full": _means(full),
            "sampled": _means(sampled),
            "draws": DRAWS,
            "folded_in": int(hold_out.has_new_items.sum()) if measured.folded_in else 0,
        }
    return {
        "decision": "published" if verdict.passed or force else "rejected",
        "finding": verdict.finding,
        "passed": verdict.passed,
        "forced": force,
        "incumbent": serving.version,
        "ndcg@10": {
            "challenger": round(verdict.challenger, DIGITS),
            "incumbent": round(verdict.incumbent, DIGITS),
            "difference": round(verdict.difference, DIGITS),
            "interval": verdict.interval and [round(end, DIGITS) for end in verdict.interval],
            "level": verdict.level,
            "p": verdict.p,
            "margin": round(verdict.margin, DIGITS),
        },
        "users": len(hold_out.users),
        "left_out": hold_out.excluded,
        "lacking": {
            "items": _missing_share(serving.checkpoint.item_ids, interactions.item_ids),
            "users": _missing_share(serving.checkpoint.user_ids, interactions.user_ids),
        },
        "relative_margin": comparison.margin,
        **metrics,
    }


def _missing_share(ids: Sequence[str], others: Sequence[str]) -> float:
    """The share of ids that are not among the others: a mistaken deletion shows here."""
    return round(float((row_indices(ids, others) < 0).mean()), DIGITS) if len(ids) else 0.0


def _means(pair: tuple[Evaluation, Evaluation]) -> dict[str, Any]:
    """The figures of a challenger and an incumbent on the same users."""
    names = ("challenger", "incumbent")
    return {
        "ndcg@10": {n: round(one.mean_ndcg, DIGITS) for n, one in zip(names, pair, strict=True)},
        "hr@10": {n: round(one.mean_hr, DIGITS) for n, one in zip(names, pair, strict=True)},
        "users": len(pair[0].ndcg),
    }
