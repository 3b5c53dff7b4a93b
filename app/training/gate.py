"""The gate of a training: compares the new model with the served one, and decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.training.progress import ProgressReporter
from app.training.reader import IncumbentComparison, ServingModel, ServingModelReadError
from ncr_core.comparison import (
    DRAWS,
    FULL_USERS,
    MIN_USERS,
    GateComparison,
    compare,
    decide,
)
from ncr_core.data.interactions import Interactions, row_indices
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import ndcg_of_each
from ncr_core.evaluation.protocols import K, ModelRanks, full_ranks, of_random_users
from ncr_core.evaluation.significance import Evaluation
from ncr_core.models.base import PairwiseRanker
from ncr_core.reproduction.baselines.scoring import Popularity

DIGITS = 5


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
        loaded = None if comparison is None else comparison.load(interactions, split.test >= 0)
    except ServingModelReadError as error:
        # All the more reason to replace it.
        report = _unconditional("incumbent_unreadable", force)
        return report | {"incumbent": error.version, "detail": str(error)}
    if comparison is None or loaded is None:
        return _compare_with_popularity(split, challenger, force)
    progress.phase("compare with what is served")
    serving, incumbent = loaded
    compared = compare(split, challenger, incumbent, comparison.margin, progress.step)
    return _report(compared, serving, interactions, comparison.margin, force)


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


def _report(
    compared: GateComparison,
    serving: ServingModel,
    interactions: Interactions,
    relative_margin: float,
    force: bool,
) -> dict[str, Any]:
    """The report on a challenger, from both models' metrics on a fair hold-out."""
    hold_out, measured, verdict = compared.hold_out, compared.evaluation, compared.decision
    metrics: dict[str, Any] = {}
    if measured is not None:
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
        "relative_margin": relative_margin,
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
