"""The gate of a training job: the report that decides whether the new model is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.jobs.progress import Clock
from app.jobs.served import Earlier, ServedModel, Unreadable
from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluated import rows_of
from ncr_core.evaluation.frozen import frozen_hold_out
from ncr_core.evaluation.gate import DRAWS, LEAST_USERS, judge, measure
from ncr_core.evaluation.metrics import FloatArray, ndcg_of_each
from ncr_core.evaluation.protocols import K, ModelRanks, ranks_of, sampled_candidates
from ncr_core.models.baselines.popularity import Popularity
from ncr_core.models.ranker import PairwiseRanker

DIGITS = 5


@dataclass(frozen=True)
class Comparison:
    """What a new model is compared with: whatever is served at that moment."""

    served: Callable[[], ServedModel | None]
    """Reads it; gives None if there is none. Raises Unreadable, and other CheckpointErrors that say
    nothing of it.
    """
    earlier: Earlier
    """Tells what it may have learned."""
    margin: float
    """By how much of its NDCG@10 a new model may be worse."""


def gate(
    split: Split,
    every: Interactions,
    challenger: PairwiseRanker,
    comparison: Comparison | None,
    clock: Clock,
    *,
    force: bool,
) -> dict[str, Any]:
    """The report on a newly trained model; ``every`` is what ``split`` was made of.

    Its ``decision`` is what is done with the model: ``published`` or ``rejected``.
    """
    try:
        served = None if comparison is None else comparison.served()
    except Unreadable as error:
        # What is served has to be replaced all the more.
        report = _uncompared("incumbent_unreadable", force)
        return report | {"incumbent": error.version, "detail": str(error)}
    if comparison is None or served is None:
        return _first(split, challenger, force)
    clock.phase("compare with what is served")
    return _compared(split, every, challenger, served, comparison, force, clock)


def _uncompared(finding: str, force: bool) -> dict[str, Any]:
    return {
        "decision": "published",
        "finding": finding,
        "passed": True,
        "forced": force,
        "incumbent": None,
    }


def _first(split: Split, challenger: PairwiseRanker, force: bool) -> dict[str, Any]:
    """Nothing is there to compare with but the popularity list, which is served until now: a model
    that is shown to be worse than that does not take its place.
    """
    candidates = sampled_candidates(split, split.test, 0)
    if len(candidates.users) < LEAST_USERS:
        return _uncompared("first", force)
    own, popular = (
        ndcg_of_each(ranks_of(ranks, candidates, K), K)
        for ranks in (ModelRanks(challenger), Popularity(split.train))
    )
    verdict = judge(own, popular, 0.0)
    if verdict.finding != "worse":
        return _uncompared("first", force)
    return _uncompared("below_popularity", force) | {
        "decision": "published" if force else "rejected",
        "passed": False,
    }


def _compared(
    split: Split,
    every: Interactions,
    challenger: PairwiseRanker,
    served: ServedModel,
    comparison: Comparison,
    force: bool,
    clock: Clock,
) -> dict[str, Any]:
    incumbent = served.incumbent(every, split.test >= 0, comparison.earlier)
    hold_out = frozen_hold_out(split, incumbent)
    figures: dict[str, Any] = {}
    own = theirs = np.zeros(0)
    if len(hold_out.users) >= LEAST_USERS:
        measured = measure(hold_out, challenger, incumbent, on_done=clock.part)
        own, theirs = measured.challenger.ndcg, measured.incumbent.ndcg
        figures = {
            "hr@10": _both(measured.challenger.hr, measured.incumbent.hr),
            "full": {
                "ndcg@10": _both(measured.full_challenger.ndcg, measured.full_incumbent.ndcg),
                "hr@10": _both(measured.full_challenger.hr, measured.full_incumbent.hr),
                "users": len(measured.full_challenger.ndcg),
            },
            "draws": DRAWS,
            "folded_in": int(hold_out.behind.sum()) if measured.followed else 0,
        }
    verdict = judge(own, theirs, comparison.margin)
    return {
        "decision": "published" if verdict.passed or force else "rejected",
        "finding": verdict.finding,
        "passed": verdict.passed,
        "forced": force,
        "incumbent": served.version,
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
        "left_out": hold_out.left_out,
        "lacking": {
            "items": _lacking(served.checkpoint.item_ids, every.item_ids),
            "users": _lacking(served.checkpoint.user_ids, every.user_ids),
        },
        "relative_margin": comparison.margin,
        **figures,
    }


def _lacking(ids: Sequence[str], of: Sequence[str]) -> float:
    """The share of the ids that are not among the others: it shows a mistaken deletion."""
    return round(float((rows_of(ids, of) < 0).mean()), DIGITS) if len(ids) else 0.0


def _both(challenger: FloatArray, incumbent: FloatArray) -> dict[str, float]:
    return {
        "challenger": round(float(challenger.mean()), DIGITS),
        "incumbent": round(float(incumbent.mean()), DIGITS),
    }
