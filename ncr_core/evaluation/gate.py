"""The gate: whether a newly trained model may take the place of the one that is served.

Both are measured on the same users, held-out items and candidates (``frozen``), and the challenger
passes if it is not worse by more than a margin: a test of non-inferiority on the paired differences
of NDCG@10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.frozen import HoldOut, Incumbent
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import (
    CandidateSet,
    K,
    full_candidates,
    ranks_of,
    sampled_candidates,
)
from ncr_core.evaluation.significance import Evaluation, bootstrap_interval, paired_t_test
from ncr_core.fold_in import FoldIn
from ncr_core.fold_in.of_training import evidence_of
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.ranking.exact import PAD, ExactRanker

DRAWS = 5  # of negatives; a user's NDCG is the mean over them
FULL_USERS = 1_000
LEVEL = 0.9  # two-sided: 5 % on either side
ENOUGH_USERS = 500
LEAST_USERS = 20

OnDone = Callable[[int, int], None]
"""Called with the passes over the users that are done, and how many there are."""
Finding = Literal["not_worse", "not_shown", "worse", "too_few_users"]


@dataclass(frozen=True)
class Verdict:
    """What a comparison found, and the figures it rests on.

    ``interval`` is that of the mean difference, challenger − incumbent, at ``level``; ``margin`` is
    in units of NDCG. ``passed`` says whether the challenger may be served.
    """

    passed: bool
    finding: Finding
    challenger: float
    incumbent: float
    difference: float
    interval: tuple[float, float] | None
    level: float
    p: float | None
    margin: float
    users: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(challenger: FloatArray, incumbent: FloatArray, relative_margin: float) -> Verdict:
    """The verdict on (n,) NDCG of the same users; the margin is a share of the incumbent's mean.

    With ``ENOUGH_USERS`` the challenger passes if the lower end of the interval of the mean
    difference is above −margin: it is shown not to be worse by so much. With fewer an equal model
    would often fail for want of users, so it passes unless it is shown to be worse: the interval
    below 0, and the mean below −margin. Below ``LEAST_USERS`` nothing can be shown, and it passes.
    """
    n = len(incumbent)
    own, theirs = (float(values.mean()) if n else 0.0 for values in (challenger, incumbent))
    margin, difference = relative_margin * theirs, own - theirs
    if n < LEAST_USERS:
        few: Finding = "too_few_users"
        return Verdict(True, few, own, theirs, difference, None, LEVEL, None, margin, n)
    interval = bootstrap_interval(challenger - incumbent, level=LEVEL)
    p = paired_t_test(challenger, incumbent).p
    finding: Finding
    if interval[0] > -margin or (challenger == incumbent).all():
        finding = "not_worse"
    elif interval[1] < 0 and difference < -margin:
        finding = "worse"
    else:
        finding = "not_shown"
    passed = finding == "not_worse" or (finding == "not_shown" and n < ENOUGH_USERS)
    return Verdict(passed, finding, own, theirs, difference, interval, LEVEL, p, margin, n)


@dataclass(frozen=True)
class Measured:
    """Both models on one hold-out: sampled candidates, and the whole catalogue for some users.

    ``followed`` tells whether the incumbent's figures are those with users' vectors fitted to what
    they have done since its training, as when lists are served; else they are those with the
    vectors as trained, which were better.
    """

    challenger: Evaluation
    incumbent: Evaluation
    full_challenger: Evaluation
    full_incumbent: Evaluation
    followed: bool


def measure(
    hold_out: HoldOut,
    challenger: PairwiseRanker,
    incumbent: Incumbent,
    *,
    draws: int = DRAWS,
    full_users: int = FULL_USERS,
    on_done: OnDone = lambda done, of: None,
) -> Measured:
    """NDCG@10 and HR@10 of each user that takes part.

    Where users have done something since the incumbent's training, it is measured twice, with their
    vectors fitted to that and as they were, and the better mean counts: what came in since then may
    be wrong, and has then spoilt the fitted vectors as it has spoilt the challenger. Raises
    ValueError when no user takes part.
    """
    rows = torch.from_numpy(hold_out.users).to(challenger.device)
    with torch.inference_mode():
        own = challenger.user_vectors(rows)
    theirs, item_rows = incumbent.evaluated.model, hold_out.items[:, 1]
    contenders = [_ByVectors(challenger, own, hold_out.items[:, 0])]
    for followed in (True, False) if _known_and_behind(hold_out) else (True,):
        vectors = incumbent_vectors(hold_out, incumbent, followed=followed)
        contenders.append(_ByVectors(theirs, vectors, item_rows))
    split, steps = hold_out.split, draws + 1
    ranks: list[list[IntArray]] = [[] for _ in contenders]
    for draw in range(draws):
        candidates = sampled_candidates(split, split.test, draw)
        for contender, found in zip(contenders, ranks, strict=True):
            found.append(contender.ranks(candidates, hold_out.users))
        on_done(draw + 1, steps)
    sampled = [Evaluation.of(found) for found in ranks]
    best = max(range(1, len(sampled)), key=lambda which: sampled[which].mean_ndcg)
    some = np.full_like(split.test, -1)
    chosen = np.random.default_rng(0).permutation(hold_out.users)[:full_users]
    some[chosen] = split.test[chosen]
    full = [
        Evaluation.of([contenders[which].full_ranks(split, some, hold_out.users)])
        for which in (0, best)
    ]
    on_done(steps, steps)
    return Measured(sampled[0], sampled[best], full[0], full[1], followed=best == 1)


def _known_and_behind(hold_out: HoldOut) -> bool:
    return bool((hold_out.behind & (hold_out.own >= 0)).any())


def incumbent_vectors(hold_out: HoldOut, incumbent: Incumbent, *, followed: bool) -> Tensor:
    """(n, E) the incumbent's vectors of the users that take part.

    Those whom it has never seen are folded in by what both models know of them; with ``followed``,
    also those who did something that it has not learned, as when lists are served.
    """
    model = incumbent.evaluated.model
    users, own = hold_out.users, hold_out.own[hold_out.users]
    fold_in = FoldIn(model)
    at = torch.from_numpy(np.maximum(own, 0)).to(model.device)
    with torch.no_grad():
        vectors = model.user_vectors(at).float().cpu()
    vectors[torch.from_numpy(own < 0)] = fold_in.newcomer
    to_fit = np.flatnonzero(hold_out.behind[users] & (followed | (own < 0)))
    if len(to_fit):
        known = evidence_of(hold_out.split.train, users[to_fit], hold_out.items[:, 1])
        vectors[to_fit] = fold_in(known, vectors[to_fit])
    return vectors.to(model.device)


class _ByVectors:
    """A model with one vector for each user that takes part, and its own rows of the items."""

    def __init__(self, model: PairwiseRanker, vectors: Tensor, item_rows: IntArray) -> None:
        self._ranker = ExactRanker(model)
        self._vectors = vectors
        self._rows = np.append(item_rows, PAD)  # the last is found by an index of −1

    def ranks(self, candidates: CandidateSet, users: IntArray) -> IntArray:
        """(n,) ranks of the held-out items; ``users`` are those whose vectors there are."""
        own = CandidateSet(
            np.searchsorted(users, candidates.users),
            self._rows[candidates.held_out],
            self._rows[candidates.candidates],
        )
        return ranks_of(self, own, K)

    def full_ranks(self, split: Split, held_out: IntArray, users: IntArray) -> IntArray:
        """(n,) ranks of these held-out items among all that was not interacted with."""
        blocks = full_candidates(split, held_out, 0)
        return np.concatenate([self.ranks(block, users) for block in blocks])

    @torch.inference_mode()
    def rank(self, users: IntArray, candidates: IntArray, k: int) -> IntArray:
        vectors = self._vectors[torch.from_numpy(users).to(self._vectors.device)]
        ranked = self._ranker.rank(vectors, torch.from_numpy(candidates), k)
        result: IntArray = ranked.cpu().numpy()
        return result
