"""Calibration: how far "preferred with probability p" can be taken at its word.

P(i preferred to j) = σ((z_ij − z_ji) / 2T), with one temperature T a model (Platt 1999; Guo et al.,
ICML'17). It is fitted to pairs that the model has not learned from: the held-out item of a user,
which won, and an item that the user has not interacted with, drawn evenly as in P1. Drawn evenly,
what is asked is which of the two the user takes up next, p(i) / (p(i) + p(j)) (Luce 1959); rivals
drawn by popularity would ask how far i is liked beyond its popularity, and that has another answer.

Each pair stands for both of its orders: as (i, j), which i won, and as (j, i), which j lost. Half
of all outcomes are then wins whatever the model says, and both orders are off by the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import CandidateSet, sampled_candidates
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.ranking.exact import PAD, ExactRanker

BINS = 15
USERS_AT_ONCE = 1024
COLDEST, HOTTEST = 1e-2, 1e2  # bounds of T, in units of the mean size of a margin
STEPS = 100
PRECISION = 1e-12


@dataclass(frozen=True, slots=True)
class Pairs:
    """What pairs that were decided say of a model.

    ``users`` (P,) are the rows of those who decided; ``margins`` (P,) are z_ij − z_ji of the item
    i that won over the item j that did not.
    """

    users: IntArray
    margins: FloatArray


@dataclass(frozen=True, slots=True)
class Bin:
    """Pairs that the model was about equally sure of: what it said, and how often it was right."""

    pairs: int
    probability: float
    share: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature, and how far probabilities are off without and with it.

    ``bins`` are of the pairs with it, from unsure to sure.
    """

    temperature: float
    ece: float
    ece_before: float
    pairs: int
    bins: Sequence[Bin]

    def figures(self) -> dict[str, float | int]:
        """The figures without the bins, for JSON."""
        return {
            "temperature": self.temperature,
            "ece": round(self.ece, 5),
            "ece_before": round(self.ece_before, 5),
            "pairs": self.pairs,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        bins = [Bin(one.pairs, round(one.probability, 5), round(one.share, 5)) for one in self.bins]
        return {**self.figures(), "bins": [asdict(one) for one in bins]}


def probability(margins: FloatArray, temperature: float = 1.0) -> FloatArray:
    """P(i preferred to j) of margins z_ij − z_ji, any shape."""
    found: FloatArray = 0.5 + 0.5 * np.tanh(margins / (4.0 * temperature))
    return found


def fit_temperature(margins: FloatArray) -> float:
    """The T with the largest likelihood of (P,) margins of winners over losers.

    The likelihood is smoothed as Platt (1999) does it: the targets are (P + 1)/(P + 2) and not 1,
    so that few pairs which the model all got right do not make it certain. It is concave in 1/T,
    whose best value is found by Newton's method inside a bracket. A model that is no better than
    chance gets the upper bound, a hundred times the mean size of a margin: all is about even then.

    Raises ValueError when there is no margin, or one that is not finite.
    """
    if not len(margins) or not bool(np.isfinite(margins).all()):
        raise ValueError(f"{len(margins)} margins, all of them finite, cannot be had")
    size = float(np.abs(margins).mean())
    if size == 0.0:
        return 1.0
    half = margins / (2.0 * size)
    target = (len(half) + 1) / (len(half) + 2)

    def slopes(b: float) -> tuple[float, float]:
        """First and second derivative by b of the loss mean(softplus(b·half) − target·b·half)."""
        p = 0.5 + 0.5 * np.tanh(0.5 * b * half)
        return float((half * (p - target)).mean()), float((half * half * p * (1 - p)).mean())

    low, high = 1.0 / HOTTEST, 1.0 / COLDEST
    if slopes(low)[0] >= 0.0:
        return size / low
    if slopes(high)[0] <= 0.0:
        return size / high
    b = 1.0
    for _ in range(STEPS):
        first, second = slopes(b)
        low, high = (b, high) if first < 0.0 else (low, b)
        step = b - first / second if second > 0.0 else low
        following = step if low < step < high else (low + high) / 2.0
        if abs(following - b) <= PRECISION * b:
            return size / following
        b = following
    return size / b


def reliability(margins: FloatArray, temperature: float = 1.0, bins: int = BINS) -> list[Bin]:
    """(P,) margins of winners over losers → at most ``bins`` bins of about as many pairs each.

    A pair counts where the model's probability for the item that it prefers puts it, between ½ and
    1; with both orders of each pair and bins over [0, 1] the same would stand there twice. Pairs of
    one probability share a bin; a tie counts as right half the time.
    """
    sure = probability(np.abs(margins), temperature)
    right = 0.5 + 0.5 * np.sign(margins)
    edges = np.unique(np.quantile(sure, np.arange(1, bins) / bins))
    of_pair = np.searchsorted(edges, sure, side="right")
    return [
        Bin(int(inside.sum()), float(sure[inside].mean()), float(right[inside].mean()))
        for at in range(len(edges) + 1)
        if (inside := of_pair == at).any()
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: the mean |probability − share| of the bins by their pairs."""
    pairs = sum(one.pairs for one in bins)
    return sum(one.pairs * abs(one.probability - one.share) for one in bins) / pairs


def measured(pairs: Pairs) -> Calibration | None:
    """Fits the temperature to all pairs and measures it on users that it was not fitted to.

    Each half of the users is measured with the temperature of the other half; ``ece`` and ``bins``
    are of both halves together. None for fewer than two users.
    """
    users, of_pair = np.unique(pairs.users, return_inverse=True)
    if len(users) < 2:
        return None
    # The halves by a fixed draw: rows of users may be in the order of their size.
    first = np.zeros(len(users), dtype=np.bool_)
    first[np.random.default_rng(0).permutation(len(users))[: len(users) // 2]] = True
    in_first = first[of_pair]
    cooled = np.empty_like(pairs.margins)
    for half in (in_first, ~in_first):
        cooled[half] = pairs.margins[half] / fit_temperature(pairs.margins[~half])
    bins = reliability(cooled)
    return Calibration(
        temperature=fit_temperature(pairs.margins),
        ece=calibration_error(bins),
        ece_before=calibration_error(reliability(pairs.margins)),
        pairs=len(pairs.margins),
        bins=bins,
    )


def calibrate(model: PairwiseRanker, split: Split, seed: int = 0) -> Calibration | None:
    """The calibration of a model on the test items of a split that it was trained on.

    None where that takes more users than are held out.
    """
    return measured(decided_pairs(model, sampled_candidates(split, split.test, seed)))


@torch.inference_mode()
def decided_pairs(model: PairwiseRanker, candidates: CandidateSet) -> Pairs:
    """The held-out item of each user over each of the other candidates."""
    ranker, parts = ExactRanker(model), list[Pairs]()
    for at in range(0, len(candidates.users), USERS_AT_ONCE):
        users = candidates.users[at : at + USERS_AT_ONCE]
        items = candidates.candidates[at : at + USERS_AT_ONCE]
        own = np.broadcast_to(candidates.held_out[at : at + USERS_AT_ONCE, None], items.shape)
        vectors = model.user_vectors(torch.from_numpy(users).to(model.device))
        won = torch.from_numpy(own.copy())
        margins = ranker.compare(vectors, won, torch.from_numpy(items).clamp(min=0))
        rival = (items != PAD) & (items != own)
        every = np.broadcast_to(users[:, None], items.shape)
        parts.append(Pairs(every[rival], margins.cpu().numpy()[rival]))
    return Pairs(
        np.concatenate([np.zeros(0, np.int64), *(part.users for part in parts)]),
        np.concatenate([np.zeros(0), *(part.margins for part in parts)]),
    )
