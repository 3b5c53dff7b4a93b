"""The gate: whether a newly trained model may replace the served one.

The gate evaluates both models on the same users, held-out items and candidates (`fair_hold_out`).
The challenger passes if it is not worse by more than a margin: a test of non-inferiority on the
paired differences of NDCG@10. Ranks among the whole catalogue decide. Where they show no result,
ranks among sampled candidates decide, which put more held-out items into the best ten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ncr_core.checkpoint import EvaluationSnapshot
from ncr_core.data.interactions import (
    BoolArray,
    IntArray,
    Interactions,
    ids_of_rows,
    row_indices,
)
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import (
    FullRanking,
    K,
    full_ranks,
    of_random_users,
    ranks_of,
    sampled_candidates,
)
from ncr_core.evaluation.significance import Evaluation, bootstrap_interval, paired_t_test
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.fold_in import FoldIn
from ncr_core.fold_in.evidence import user_evidence
from ncr_core.models.base import PairwiseRanker


@dataclass(frozen=True)
class Incumbent:
    """The served model, as it was evaluated before it was served."""

    evaluated: EvaluationSnapshot
    user_ids: Sequence[str]
    """The ids of all its user rows."""
    item_ids: Sequence[str]
    """The ids of all its item rows."""
    trained_on: Interactions
    """The interactions at the time of its training, in the challenger's rows."""
    compared: Interactions | None = None
    """Users and items of the preferences of its training, in the challenger's rows."""
    names_all_users: bool = True
    """Whether ``user_ids`` has all users of its training; see ``Checkpoint.trained_users``."""


@dataclass(frozen=True)
class FairHoldOut:
    """The hold-out that both models are evaluated on."""

    split: Split
    """The challenger's users and the n items that both models know; ``test`` is −1 for users who do
    not take part."""
    items: IntArray
    """(n, 2) the items' rows in the challenger and in the incumbent."""
    incumbent_rows: IntArray
    """(n_users,) the users' rows in the incumbent's `EvaluationSnapshot`, −1 for unknown users and
    for users without a held-out item."""
    has_new_items: BoolArray
    """(n_users,) users with items in ``split.train`` that the incumbent has not learned."""
    excluded: dict[str, int]
    """The number of users that do not take part, by reason."""

    @property
    def users(self) -> IntArray:
        """The users that take part, ascending."""
        return np.flatnonzero(self.split.test >= 0)


def fair_hold_out(split: Split, incumbent: Incumbent) -> FairHoldOut:
    """Select the part of the challenger's hold-out that is fair to both models.

    A hold-out is fair if neither model has learned its items, and both models know the same of the
    users:

    * A user takes part if the incumbent has learned neither of the user's two held-out items. The
      gate evaluates the incumbent's `EvaluationSnapshot`, which has not learned the incumbent's own
      held-out items. Events after its training are unknown to the incumbent.
    * The challenger was trained on the user's events since then, up to the held-out items. A
      fold-in fits the incumbent's vector of the user to the same events, as for a served list.
    * Candidates are the items that both models know. A user whose held-out item only one model
      knows is excluded. Knowledge of new items favours the challenger, but does not measure its
      ranking.

    The exclusion of a user depends on the times of events, not on the quality of a model's ranking.
    """
    train = split.train
    users = np.flatnonzero(split.test >= 0)
    knowledge = _IncumbentKnowledge(train, users, incumbent)
    unknown = knowledge.item_rows[split.test[users]] < 0
    learned = knowledge.learned_held_out(split, users)
    # The snapshot has vectors only of users that it held items out of.
    no_snapshot = (knowledge.user_rows[users] >= 0) & (knowledge.snapshot_rows[users] < 0)
    excluded = {
        "held-out item unknown to the incumbent": int(unknown.sum()),
        "held-out item learned by the incumbent": int((learned & ~unknown).sum()),
        "not held out from by the incumbent": int((no_snapshot & ~learned & ~unknown).sum()),
    }
    fair = users[~unknown & ~learned & ~no_snapshot]

    common = np.flatnonzero(knowledge.item_rows >= 0)
    column = np.full(train.n_items, -1, dtype=np.int64)
    column[common] = np.arange(len(common))
    test, validation = (np.full(train.n_users, -1, dtype=np.int64) for _ in range(2))
    test[fair] = column[split.test[fair]]
    validation[fair] = column[split.validation[fair]]  # learned by neither, and no candidate
    takes_part = test >= 0
    # The users first: of all users the other items would take several times the matrix's memory.
    of_these_users = train.select(train.entries_of(takes_part))
    common_ids = ids_of_rows(train.item_ids, common)
    common_train = of_these_users.reindex(train.user_ids, common_ids)
    learned_entries = knowledge.learned(common_train.users, common[common_train.items])
    has_new_items = takes_part & (knowledge.snapshot_rows < 0)
    has_new_items[common_train.users[~learned_entries]] = True
    return FairHoldOut(
        Split(common_train, validation, test),
        np.stack([common, knowledge.item_rows[common]], axis=1),
        knowledge.snapshot_rows,
        has_new_items,
        excluded,
    )


def leaked_users(split: Split, incumbent: Incumbent) -> BoolArray:
    """(n_users,) users with a held-out item that the incumbent's snapshot has learned."""
    users = np.flatnonzero(split.test >= 0)
    leaked = np.zeros(split.train.n_users, dtype=np.bool_)
    knowledge = _IncumbentKnowledge(split.train, users, incumbent)
    leaked[users] = knowledge.learned_held_out(split, users)
    return leaked


class _IncumbentKnowledge:
    """The incumbent's rows of some users and all items of the challenger.

    The rows are −1 for unknown users and items, and for all other users. ``snapshot_rows`` are the
    users' rows in the `EvaluationSnapshot`.
    """

    def __init__(self, train: Interactions, users: IntArray, incumbent: Incumbent) -> None:
        snapshot = incumbent.evaluated
        self.user_rows = np.full(train.n_users, -1, dtype=np.int64)
        self.user_rows[users] = row_indices(ids_of_rows(train.user_ids, users), incumbent.user_ids)
        self.item_rows = row_indices(train.item_ids, incumbent.item_ids)
        row_in_snapshot = np.full(len(incumbent.user_ids) + 1, -1, dtype=np.int64)
        row_in_snapshot[snapshot.rows] = np.arange(len(snapshot.rows))
        self.snapshot_rows = row_in_snapshot[self.user_rows]
        self._held_out = np.append(snapshot.held_out, [[-1, -1]], axis=0)
        self._trained_on, self._compared = incumbent.trained_on, incumbent.compared
        self._names_all_users = incumbent.names_all_users

    def learned_held_out(self, split: Split, users: IntArray) -> BoolArray:
        """Whether the snapshot has learned a held-out item of each user, or a preference about one.

        The snapshot has not learned the items that the incumbent held out itself.
        """
        result = np.zeros(len(users), dtype=np.bool_)
        for items in (split.test[users], split.validation[users]):
            result |= self.learned(users, items)
            if self._compared is not None:
                result |= self._trained(self._compared, users, items)
        return result

    def learned(self, users: IntArray, items: IntArray) -> BoolArray:
        """Whether the snapshot was trained on these interactions."""
        return self._trained(self._trained_on, users, items)

    def _trained(self, data: Interactions, users: IntArray, items: IntArray) -> BoolArray:
        # What the incumbent held out was in nothing that its snapshot was trained on.
        rows = self.item_rows[items]
        held_out = (rows[:, None] == self._held_out[self.snapshot_rows[users]]).any(axis=1)
        known = rows >= 0
        if self._names_all_users:
            known &= self.user_rows[users] >= 0
        result: BoolArray = data.contains(users, items) & known & ~held_out
        return result


DRAWS = 5
"""Draws of the sampled negatives; a user's NDCG is the mean over them."""
FULL_USERS = 1_000
"""The number of users whose held-out item is ranked among the whole catalogue."""
LEVEL = 0.9
"""The level of the two-sided interval: 5 % on either side."""
ENOUGH_USERS = 500
MIN_USERS = 20

OnDone = Callable[[int, int], None]
"""Called with the number of finished passes over the users, and of all passes."""
GateFinding = Literal["not_worse", "not_shown", "worse", "too_few_users"]
GateProtocol = Literal["full", "sampled"]


@dataclass(frozen=True)
class GateDecision:
    """The result of the comparison of a challenger with the incumbent, and its figures."""

    passed: bool
    """Whether the challenger may be served."""
    finding: GateFinding
    challenger: float
    """The mean NDCG@10 of the challenger."""
    incumbent: float
    """The mean NDCG@10 of the incumbent."""
    difference: float
    """challenger − incumbent."""
    interval: tuple[float, float] | None
    """The interval of the mean difference at ``level``; None for too few users."""
    level: float
    p: float | None
    """The p of the paired t-test; None for too few users."""
    margin: float
    """How much worse the challenger may be, in units of NDCG."""
    users: int
    protocol: GateProtocol = "full"
    """The candidates that decided: the whole catalogue, or a sample."""

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def decide(challenger: FloatArray, incumbent: FloatArray, relative_margin: float) -> GateDecision:
    """Decide by the (n,) NDCG of the same users under both models.

    With `ENOUGH_USERS` or more users, the challenger passes if the lower end of the interval of the
    mean difference is above −margin. With fewer users, an equal model would often fail that test.
    There the challenger passes unless the interval is below 0 and the mean difference below
    −margin. With fewer than `MIN_USERS` users, the challenger always passes.

    Args:
        challenger: (n,) NDCG@10 of the new model, by user.
        incumbent: (n,) NDCG@10 of the served model, by user.
        relative_margin: the margin as a share of the incumbent's mean.
    """
    n = len(incumbent)
    mean, incumbent_mean = (float(x.mean()) if n else 0.0 for x in (challenger, incumbent))
    margin, difference = relative_margin * incumbent_mean, mean - incumbent_mean
    finding: GateFinding = "too_few_users"
    interval = p = None
    if n >= MIN_USERS:
        interval = bootstrap_interval(challenger - incumbent, level=LEVEL)
        p = paired_t_test(challenger, incumbent).p
        if interval[0] > -margin or (challenger == incumbent).all():
            finding = "not_worse"
        elif interval[1] < 0 and difference < -margin:
            finding = "worse"
        else:
            finding = "not_shown"
    passed = finding != "worse" and not (finding == "not_shown" and n >= ENOUGH_USERS)
    return GateDecision(
        passed, finding, mean, incumbent_mean, difference, interval, LEVEL, p, margin, n
    )


@dataclass(frozen=True)
class GateEvaluation:
    """Both models on one hold-out: sampled candidates, and the whole catalogue for some users."""

    challenger: Evaluation
    incumbent: Evaluation
    full_challenger: Evaluation
    full_incumbent: Evaluation
    folded_in: bool
    """Whether the incumbent's figures are with users' vectors that are fitted to events since its
    training, as in served lists. If False, the vectors as trained were better."""

    def decide(self, relative_margin: float) -> GateDecision:
        """The decision by the whole catalogue, or by sampled candidates after ``not_shown``."""
        by_full = decide(self.full_challenger.ndcg, self.full_incumbent.ndcg, relative_margin)
        if by_full.finding != "not_shown":
            return by_full
        by_sampled = decide(self.challenger.ndcg, self.incumbent.ndcg, relative_margin)
        return replace(by_sampled, protocol="sampled")


@dataclass(frozen=True)
class GateComparison:
    """A challenger and the incumbent on a fair hold-out, and the decision."""

    hold_out: FairHoldOut
    evaluation: GateEvaluation | None
    """None for fewer users than `MIN_USERS`."""
    decision: GateDecision


def compare(
    split: Split,
    challenger: PairwiseRanker,
    incumbent: Incumbent,
    relative_margin: float,
    on_done: OnDone = lambda done, total: None,
    rank_in_full: FullRanking = full_ranks,
) -> GateComparison:
    """Compare a challenger, trained on ``split``, with the incumbent, and decide.

    Args:
        split: the split that the challenger was trained on; its test items are held out.
        challenger: the new model.
        incumbent: the served model.
        relative_margin: see `decide`.
        on_done: called with the progress.
        rank_in_full: ranks the held-out items among the whole catalogue; by default this process.
    """
    hold_out = fair_hold_out(split, incumbent)
    if len(hold_out.users) < MIN_USERS:
        nothing = np.zeros(0)
        return GateComparison(hold_out, None, decide(nothing, nothing, relative_margin))
    evaluation = evaluate_both(
        hold_out, challenger, incumbent, on_done=on_done, rank_in_full=rank_in_full
    )
    return GateComparison(hold_out, evaluation, evaluation.decide(relative_margin))


def evaluate_both(
    hold_out: FairHoldOut,
    challenger: PairwiseRanker,
    incumbent: Incumbent,
    *,
    draws: int = DRAWS,
    full_users: int = FULL_USERS,
    on_done: OnDone = lambda done, total: None,
    rank_in_full: FullRanking = full_ranks,
) -> GateEvaluation:
    """Compute NDCG@10 and HR@10 of each user that takes part, under both models.

    If users have new items since the incumbent's training, the incumbent is evaluated twice: with
    these users' vectors fitted to the new items, and as trained. The better mean counts, because
    wrong new items spoil the fitted vectors as they spoil the challenger. Raises ValueError if no
    user takes part.
    """
    rows = torch.from_numpy(hold_out.users).to(challenger.device)
    with torch.inference_mode():
        challenger_vectors = challenger.user_vectors(rows)
    users, (own_rows, their_rows) = hold_out.users, hold_out.items.T
    rankers = [VectorRanks(challenger, users, challenger_vectors, own_rows)]
    known_with_new_items = hold_out.has_new_items & (hold_out.incumbent_rows >= 0)
    for folded_in in (True, False) if known_with_new_items.any() else (True,):
        vectors = incumbent_vectors(hold_out, incumbent, folded_in=folded_in)
        rankers.append(VectorRanks(incumbent.evaluated.model, users, vectors, their_rows))
    split, passes = hold_out.split, draws + 1
    ranks: list[list[IntArray]] = [[] for _ in rankers]
    for draw in range(draws):
        candidates = sampled_candidates(split, split.test, draw)
        for ranker, ranks_by_draw in zip(rankers, ranks, strict=True):
            ranks_by_draw.append(ranks_of(ranker, candidates, K))
        on_done(draw + 1, passes)
    sampled = [Evaluation.of(ranks_by_draw) for ranks_by_draw in ranks]
    best = max(range(1, len(sampled)), key=lambda index: sampled[index].mean_ndcg)
    full_test = of_random_users(split.test, full_users)
    full = [
        Evaluation.of([rank_in_full(rankers[index], split, full_test, 0)[0]]) for index in (0, best)
    ]
    on_done(passes, passes)
    return GateEvaluation(sampled[0], sampled[best], full[0], full[1], folded_in=best == 1)


def incumbent_vectors(hold_out: FairHoldOut, incumbent: Incumbent, *, folded_in: bool) -> Tensor:
    """(n, E) the incumbent's vectors of the users that take part.

    Users unknown to the incumbent are folded in by the items that both models know. With
    ``folded_in``, users with items that the incumbent has not learned are folded in too, as in
    served lists.
    """
    model = incumbent.evaluated.model
    users = hold_out.users
    rows = hold_out.incumbent_rows[users]
    fold_in = FoldIn(model)
    with torch.no_grad():
        known_rows = torch.from_numpy(np.maximum(rows, 0)).to(model.device)
        vectors = model.user_vectors(known_rows).float().cpu()
    vectors[torch.from_numpy(rows < 0)] = fold_in.newcomer
    to_fit = np.flatnonzero(hold_out.has_new_items[users] & (folded_in | (rows < 0)))
    if len(to_fit):
        evidence = user_evidence(hold_out.split.train, users[to_fit], hold_out.items[:, 1])
        vectors[to_fit] = fold_in(evidence, vectors[to_fit])
    return vectors.to(model.device)
