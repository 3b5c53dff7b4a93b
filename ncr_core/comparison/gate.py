"""The gate: whether a newly trained model may replace the served one.

Both are evaluated on the same users, held-out items and candidates (`fair_hold_out`). The
challenger passes if it is not worse by more than a margin: a test of non-inferiority on the paired
differences of NDCG@10. The whole catalogue decides; where it shows nothing, sampled candidates do,
by which more users find their item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ncr_core.comparison.fair_holdout import FairHoldOut, Incumbent, fair_hold_out
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import (
    CandidateSet,
    K,
    full_candidates,
    of_random_users,
    ranks_of,
    sampled_candidates,
)
from ncr_core.evaluation.significance import Evaluation, bootstrap_interval, paired_t_test
from ncr_core.fold_in import FoldIn
from ncr_core.fold_in.evidence import user_evidence
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.ranker import PAD, ExactRanker

DRAWS = 5
"""Draws of the sampled negatives; a user's NDCG is the mean over them."""
FULL_USERS = 1_000
"""The number of users whose held-out item is ranked among the whole catalogue."""
LEVEL = 0.9
"""The level of the two-sided interval: 5 % on either side."""
ENOUGH_USERS = 500
MIN_USERS = 20

OnDone = Callable[[int, int], None]
"""Called with the number of passes over the users that are done, and of all passes."""
GateFinding = Literal["not_worse", "not_shown", "worse", "too_few_users"]
GateProtocol = Literal["full", "sampled"]


@dataclass(frozen=True)
class GateDecision:
    """What the comparison of a challenger with the incumbent showed, and its figures."""

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
    """What decided: the whole catalogue, or sampled candidates."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def decide(challenger: FloatArray, incumbent: FloatArray, relative_margin: float) -> GateDecision:
    """Decide by the (n,) NDCG of the same users under both models.

    With `ENOUGH_USERS` the challenger passes if the lower end of the interval of the mean
    difference is above −margin: it is shown not to be worse by so much. With fewer, an equal model
    would often fail for want of users; it passes unless it is shown to be worse (the interval below
    0 and the mean below −margin). Below `MIN_USERS` nothing can be shown, and it passes.

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
    """Whether the incumbent's figures are those with users' vectors fitted to what they have done
    since its training, as in served lists. Else the vectors as trained were better."""

    def decide(self, relative_margin: float) -> GateDecision:
        """The decision by the whole catalogue, and by sampled candidates if it shows nothing."""
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
) -> GateComparison:
    """Compare a challenger, trained on ``split``, with the incumbent, and decide.

    Args:
        split: what the challenger was trained on; its test items are held out.
        challenger: the new model.
        incumbent: the served model.
        relative_margin: see `decide`.
        on_done: told of the progress.
    """
    hold_out = fair_hold_out(split, incumbent)
    if len(hold_out.users) < MIN_USERS:
        nothing = np.zeros(0)
        return GateComparison(hold_out, None, decide(nothing, nothing, relative_margin))
    evaluation = evaluate_both(hold_out, challenger, incumbent, on_done=on_done)
    return GateComparison(hold_out, evaluation, evaluation.decide(relative_margin))


def evaluate_both(
    hold_out: FairHoldOut,
    challenger: PairwiseRanker,
    incumbent: Incumbent,
    *,
    draws: int = DRAWS,
    full_users: int = FULL_USERS,
    on_done: OnDone = lambda done, total: None,
) -> GateEvaluation:
    """Compute NDCG@10 and HR@10 of each user that takes part, under both models.

    Where users have new items since the incumbent's training, it is evaluated twice, with their
    vectors fitted to these and as trained, and the better mean counts: the new items may be wrong,
    and have then spoilt the fitted vectors as they have spoilt the challenger. Raises ValueError if
    no user takes part.
    """
    rows = torch.from_numpy(hold_out.users).to(challenger.device)
    with torch.inference_mode():
        challenger_vectors = challenger.user_vectors(rows)
    rankers = [_VectorRanker(challenger, challenger_vectors, hold_out.items[:, 0])]
    known_with_new_items = hold_out.has_new_items & (hold_out.incumbent_rows >= 0)
    for folded_in in (True, False) if known_with_new_items.any() else (True,):
        vectors = incumbent_vectors(hold_out, incumbent, folded_in=folded_in)
        rankers.append(_VectorRanker(incumbent.evaluated.model, vectors, hold_out.items[:, 1]))
    split, passes = hold_out.split, draws + 1
    ranks: list[list[IntArray]] = [[] for _ in rankers]
    for draw in range(draws):
        candidates = sampled_candidates(split, split.test, draw)
        for ranker, ranks_by_draw in zip(rankers, ranks, strict=True):
            ranks_by_draw.append(ranker.ranks(candidates, hold_out.users))
        on_done(draw + 1, passes)
    sampled = [Evaluation.of(ranks_by_draw) for ranks_by_draw in ranks]
    best = max(range(1, len(sampled)), key=lambda index: sampled[index].mean_ndcg)
    full_test = of_random_users(split.test, full_users)
    full = [
        Evaluation.of([rankers[index].full_ranks(split, full_test, hold_out.users)])
        for index in (0, best)
    ]
    on_done(passes, passes)
    return GateEvaluation(sampled[0], sampled[best], full[0], full[1], folded_in=best == 1)


def incumbent_vectors(hold_out: FairHoldOut, incumbent: Incumbent, *, folded_in: bool) -> Tensor:
    """(n, E) the incumbent's vectors of the users that take part.

    Users that it has never seen are folded in by the items that both models know. With
    ``folded_in``, so are users with items that it has not learned, as in served lists.
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


class _VectorRanker:
    """Ranks by one vector for each user that takes part, and the model's rows of the items."""

    def __init__(self, model: PairwiseRanker, vectors: Tensor, item_rows: IntArray) -> None:
        self._ranker = ExactRanker(model)
        self._vectors = vectors
        self._rows = np.append(item_rows, PAD)  # an index of −1 takes the last

    def ranks(self, candidates: CandidateSet, users: IntArray) -> IntArray:
        """(n,) ranks of the held-out items; ``users`` are those of the vectors, ascending."""
        in_model_rows = CandidateSet(
            np.searchsorted(users, candidates.users),
            self._rows[candidates.held_out],
            self._rows[candidates.candidates],
        )
        return ranks_of(self, in_model_rows, K)

    def full_ranks(self, split: Split, held_out: IntArray, users: IntArray) -> IntArray:
        """(n,) ranks of held-out items among all items that were not interacted with."""
        blocks = full_candidates(split, held_out, 0)
        return np.concatenate([self.ranks(block, users) for block in blocks])

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        vectors = self._vectors[torch.from_numpy(users).to(self._vectors.device)]
        ranked = self._ranker.rank(vectors, torch.from_numpy(candidates), k)
        result: IntArray = ranked.cpu().numpy()
        return result
