"""The gate of a training: compares the new model with the served model, and decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.events.training_snapshot import NamedItems, TrainingSnapshot
from app.training.progress import ProgressReporter
from app.training.reader import Features, TrainingReader
from ncr_core.checkpoint import Checkpoint, EvaluationSnapshot
from ncr_core.comparison import (
    DRAWS,
    GateComparison,
    Incumbent,
    compare,
    decide,
)
from ncr_core.data.interactions import BoolArray, IntArray, Interactions
from ncr_core.data.splits import Split, hashes_of
from ncr_core.errors import CheckpointError, CheckpointReadError
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import FullRanking, full_ranks
from ncr_core.evaluation.significance import Evaluation
from ncr_core.models.base import PairwiseRanker
from ncr_core.train_config import resolve_device

DIGITS = 5


class ServingModelReadError(CheckpointError):
    """The checkpoint of the served version is damaged or gone."""

    def __init__(self, version: str, reason: str) -> None:
        super().__init__(reason)
        self.version = version


@dataclass(frozen=True)
class ServingModel:
    """The version that was active at the time of loading."""

    version: str
    trained_seq: int
    checkpoint: Checkpoint
    evaluated: EvaluationSnapshot | None
    """The model as it was evaluated; None in checkpoints of older releases without snapshots."""


class IncumbentComparison:
    """The comparison of a challenger with the model that is served at that moment.

    Args:
        reader: Reads the served model.
        snapshot: The snapshot that the challenger's data were made of.
        margin: The share of the incumbent's NDCG@10 by which the challenger may be worse.
    """

    def __init__(self, reader: TrainingReader, snapshot: TrainingSnapshot, margin: float) -> None:
        self.margin = margin
        self._reader = reader
        self._snapshot = snapshot
        self._named: NamedItems | None = None
        self._serving_model: ServingModel | None = None

    def read_users(self, interactions: Interactions, users: BoolArray) -> None:
        """Reads what these users named, and closes the snapshot, which nobody needs any more."""
        self._named = self._snapshot.named_items(interactions, users)
        self._snapshot.close()

    def load(
        self, interactions: Interactions, users: BoolArray
    ) -> tuple[ServingModel, Incumbent] | None:
        """The served model, and the incumbent from it on these users; None if no model is served.

        Each call reads the served version from the registry. The same version is loaded only once.

        Args:
            interactions: The challenger's data.
            users: (n_users,) mask of the users to compare on, all of them users that were read of
                these interactions.

        Raises:
            ServingModelReadError: The checkpoint is damaged or gone.
            CheckpointError: The checkpoint could not be read, but may be intact.
        """
        serving = self._reader.read(self._load_serving_model, CheckpointReadError)
        self._serving_model = serving
        if serving is None:
            return None
        evaluated, checkpoint = serving.evaluated, serving.checkpoint
        if evaluated is None:
            # It has learned everything that there was: only newer interactions are fair.
            rows = np.arange(len(checkpoint.user_ids))
            evaluated = EvaluationSnapshot(checkpoint.model, rows, np.full((len(rows), 2), -1))
        assert self._named is not None  # noqa: S101 - the training has read its users
        known = known_at(self._named, interactions, users, serving.trained_seq)
        return serving, Incumbent(
            evaluated,
            checkpoint.user_ids,
            checkpoint.item_ids,
            *known,
            names_all_users=checkpoint.names_all_users,
        )

    async def _load_serving_model(self, features: Features) -> ServingModel | None:
        row = await features.models.serving()
        loaded = self._serving_model
        if row is None or (loaded is not None and loaded.version == row.version):
            return None if row is None else loaded
        device = str(resolve_device(self._reader.device))
        try:
            checkpoint, evaluated = await features.models.load_measured(row, device)
        except CheckpointReadError:
            raise
        except CheckpointError as error:
            raise ServingModelReadError(row.version, str(error)) from None
        return ServingModel(row.version, row.trained_seq, checkpoint, evaluated)


def known_at(
    named: NamedItems, interactions: Interactions, users: BoolArray, seq: int
) -> tuple[Interactions, Interactions]:
    """The parts of some users' interactions that were known at ``seq``.

    Args:
        named: The items that these users named.
        interactions: All interactions.
        users: (n_users,) mask of the users.
        seq: The seq up to which the incumbent was trained.

    Returns:
        The interactions with an event of any weight by then, and the interactions whose item the
        user had named by then in a preference, even if the preference was taken back later.
    """
    mask, rows = interactions.entries_of(users), np.flatnonzero(users)
    theirs = interactions.of_rows(rows)
    keys = rows[theirs.users] * interactions.n_items + theirs.items

    def select(named: IntArray) -> Interactions:
        """The users' interactions among these users and items, up to ``seq``."""
        user, item, _ = named[named[:, 2] <= seq].T
        selected = mask.copy()
        selected[mask] = np.isin(keys, user * interactions.n_items + item)
        return interactions.select(selected)

    return select(named.events), select(named.preferences)


def gate_report(
    split: Split,
    interactions: Interactions,
    challenger: PairwiseRanker,
    comparison: IncumbentComparison | None,
    progress: ProgressReporter,
    full_ndcg: tuple[FloatArray, FloatArray],
    *,
    force: bool,
    rank_in_full: FullRanking = full_ranks,
) -> dict[str, Any]:
    """Decides whether a newly trained model is ``published`` or ``rejected``.

    Args:
        split: The split that the challenger was trained and evaluated on.
        interactions: The interactions that ``split`` was made of.
        challenger: The new model.
        comparison: The comparison with the served model; None: with the popularity list.
        progress: Reports the phase.
        full_ndcg: (n,) NDCG@10 over the whole catalogue of the challenger and of the popularity
            list, for the same users. They decide on a first model.
        force: Publish the model despite the comparison.
        rank_in_full: Ranks held-out items among the whole catalogue; by default this process.

    Returns:
        The report; its ``decision`` is ``published`` or ``rejected``.
    """
    try:
        loaded = None if comparison is None else comparison.load(interactions, split.test >= 0)
    except ServingModelReadError as error:
        # All the more reason to replace it.
        report = _unconditional("incumbent_unreadable", force)
        return report | {"incumbent": error.version, "detail": str(error)}
    if comparison is None or loaded is None:
        return _compare_with_popularity(*full_ndcg, force)
    progress.phase("compare with what is served")
    serving, incumbent = loaded
    compared = compare(split, challenger, incumbent, comparison.margin, progress.step, rank_in_full)
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
    model_ndcg: FloatArray, popularity_ndcg: FloatArray, force: bool
) -> dict[str, Any]:
    """The report on a first model, which replaces the popularity list.

    The gate rejects the model if the model is shown to be worse than the list.
    """
    if decide(model_ndcg, popularity_ndcg, 0.0).finding != "worse":
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
    """The share of ids, 0 to 1, that are not among the others; shows a mistaken deletion."""
    if not len(ids):
        return 0.0
    # By hashes of 8 B: a dictionary takes over 100 B an id.
    known = np.isin(hashes_of(ids), hashes_of(others))
    return round(float(1 - known.mean()), DIGITS)


def _means(pair: tuple[Evaluation, Evaluation]) -> dict[str, Any]:
    """The figures of a challenger and an incumbent on the same users."""
    names = ("challenger", "incumbent")
    return {
        "ndcg@10": {n: round(one.mean_ndcg, DIGITS) for n, one in zip(names, pair, strict=True)},
        "hr@10": {n: round(one.mean_hr, DIGITS) for n, one in zip(names, pair, strict=True)},
        "users": len(pair[0].ndcg),
    }
