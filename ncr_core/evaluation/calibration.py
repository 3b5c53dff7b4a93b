"""Calibration: the agreement of preference probabilities with the choices of users.

P(i preferred to j) = σ((z_ij − z_ji) / 2T), with one temperature T a model (Platt 1999; Guo et al.,
ICML'17). T is fitted to pairs that the model has not learned. The winner of a pair is the held-out
item of a user. The loser is an item that the user has not interacted with, drawn uniformly as in
P1. With uniform draws P is the probability that the user takes up i before j, p(i) / (p(i) + p(j))
(Luce 1959). Draws by popularity would measure another quantity: how far users like i beyond its
popularity.

Each pair counts in both of its orders: as a win of (i, j) and as a loss of (j, i). Half of all
outcomes are then wins for any model, and both orders have the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import FloatArray
from ncr_core.evaluation.protocols import CandidateSet, sampled_candidates
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.ranker import PAD, ExactRanker

BINS = 15
USERS_PER_BLOCK = 1024
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e2  # in units of the mean size of a margin
MAX_STEPS = 100
PRECISION = 1e-12


@dataclass(frozen=True, slots=True)
class DecidedPairs:
    """A model's margins of pairs of items of which the user chose one."""

    users: IntArray
    """(P,) the rows of the users."""
    margins: FloatArray
    """(P,) z_ij − z_ji of the chosen item i over the other item j."""


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Pairs with about equal probabilities by the model."""

    pairs: int
    probability: float
    """The mean probability of the item that the model prefers."""
    share: float
    """The share of pairs in which the user chose the item that the model prefers."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature, and the calibration errors with and without the temperature."""

    temperature: float
    ece: float
    """The expected calibration error with the temperature."""
    ece_before: float
    """The expected calibration error at temperature 1."""
    pairs: int
    bins: Sequence[ReliabilityBin]
    """The bins of the pairs with the temperature, by ascending probability."""

    def figures(self) -> dict[str, float | int]:
        """The figures without the bins, for JSON."""
        return {
            "temperature": self.temperature,
            "ece": round(self.ece, 5),
            "ece_before": round(self.ece_before, 5),
            "pairs": self.pairs,
        }

    def as_dict(self) -> dict[str, Any]:
        """The figures and the bins, for JSON."""
        bins = [
            {"pairs": b.pairs, "probability": round(b.probability, 5), "share": round(b.share, 5)}
            for b in self.bins
        ]
        return {**self.figures(), "bins": bins}


def probability(margins: FloatArray, temperature: float = 1.0) -> FloatArray:
    """P(i preferred to j) of margins z_ij − z_ji, any shape."""
    result: FloatArray = 0.5 + 0.5 * np.tanh(margins / (4.0 * temperature))
    return result


def fit_temperature(margins: FloatArray) -> float:
    """The maximum-likelihood temperature of (P,) margins of winners over losers.

    The likelihood has smoothed targets (Platt 1999): (P + 1)/(P + 2) in place of 1. A few pairs,
    all predicted correctly, then do not make the model certain. The likelihood is concave in 1/T,
    and Newton's method finds the maximum inside a bracket.

    A model that is no better than chance gets `MAX_TEMPERATURE` times the mean size of a margin, so
    that all probabilities are about even. If all margins are 0, the temperature is 1. Raises
    ValueError if there is no margin, or a margin is not finite.
    """
    if not len(margins) or not bool(np.isfinite(margins).all()):
        raise ValueError(f"one or more margins, all finite, are needed; there are {len(margins)}")
    size = float(np.abs(margins).mean())
    if size == 0.0:
        return 1.0
    half = margins / (2.0 * size)
    target = (len(half) + 1) / (len(half) + 2)

    def slopes(b: float) -> tuple[float, float]:
        """First and second derivative in b of the loss mean(softplus(b·half) − target·b·half)."""
        p = 0.5 + 0.5 * np.tanh(0.5 * b * half)
        return float((half * (p - target)).mean()), float((half * half * p * (1 - p)).mean())

    low, high = 1.0 / MAX_TEMPERATURE, 1.0 / MIN_TEMPERATURE
    if slopes(low)[0] >= 0.0:
        return size / low
    if slopes(high)[0] <= 0.0:
        return size / high
    b = 1.0
    for _ in range(MAX_STEPS):
        first, second = slopes(b)
        low, high = (b, high) if first < 0.0 else (low, b)
        step = b - first / second if second > 0.0 else low
        following = step if low < step < high else (low + high) / 2.0
        if abs(following - b) <= PRECISION * b:
            return size / following
        b = following
    return size / b


def reliability(
    margins: FloatArray, temperature: float = 1.0, bins: int = BINS
) -> list[ReliabilityBin]:
    """(P,) margins of winners over losers → at most ``bins`` bins of about equally many pairs.

    The bin of a pair depends on the probability of the item that the model prefers, between ½ and
    1. Bins over [0, 1] would show each pair twice, once in each order. Pairs with equal
    probabilities share a bin. A tie counts as half correct.
    """
    confidence = probability(np.abs(margins), temperature)
    correct = 0.5 + 0.5 * np.sign(margins)
    edges = np.unique(np.quantile(confidence, np.arange(1, bins) / bins))
    bin_of_pair = np.searchsorted(edges, confidence, side="right")
    return [
        ReliabilityBin(
            int(inside.sum()), float(confidence[inside].mean()), float(correct[inside].mean())
        )
        for index in range(len(edges) + 1)
        if (inside := bin_of_pair == index).any()
    ]


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """The expected calibration error: the mean |probability − share|, weighted by pairs."""
    pairs = sum(b.pairs for b in bins)
    return sum(b.pairs * abs(b.probability - b.share) for b in bins) / pairs


def cross_fit(pairs: DecidedPairs) -> Calibration | None:
    """Fit the temperature to all pairs, and measure the calibration error on held-out users.

    Each half of the users is measured with the temperature of the other half. ``ece`` and ``bins``
    are of both halves together.

    Returns:
        The calibration; None for fewer than two users.
    """
    users, user_of_pair = np.unique(pairs.users, return_inverse=True)
    if len(users) < 2:
        return None
    # The halves are drawn with a fixed seed: rows of users may be in the order of their size.
    first_half = np.zeros(len(users), dtype=np.bool_)
    first_half[np.random.default_rng(0).permutation(len(users))[: len(users) // 2]] = True
    in_first_half = first_half[user_of_pair]
    scaled = np.empty_like(pairs.margins)
    for half in (in_first_half, ~in_first_half):
        scaled[half] = pairs.margins[half] / fit_temperature(pairs.margins[~half])
    bins = reliability(scaled)
    return Calibration(
        temperature=fit_temperature(pairs.margins),
        ece=calibration_error(bins),
        ece_before=calibration_error(reliability(pairs.margins)),
        pairs=len(pairs.margins),
        bins=bins,
    )


def calibrate(model: PairwiseRanker, split: Split, seed: int = 0) -> Calibration | None:
    """The calibration of a model on the test items of the split that it was trained on.

    Returns:
        The calibration; None for fewer than two users with a test item.
    """
    return cross_fit(decided_pairs(model, sampled_candidates(split, split.test, seed)))


@torch.inference_mode()
def decided_pairs(model: PairwiseRanker, candidates: CandidateSet) -> DecidedPairs:
    """Margins of each user's held-out item over each of the other candidates."""
    ranker = ExactRanker(model)
    users, margins = [np.zeros(0, np.int64)], [np.zeros(0)]
    for start in range(0, len(candidates.users), USERS_PER_BLOCK):
        block = slice(start, start + USERS_PER_BLOCK)
        rows, items = candidates.users[block], candidates.candidates[block]
        target = np.broadcast_to(candidates.held_out[block, None], items.shape)
        vectors = model.user_vectors(torch.from_numpy(rows).to(model.device))
        winners = torch.from_numpy(target.copy())
        compared = ranker.compare(vectors, winners, torch.from_numpy(items).clamp(min=0))
        is_rival = (items != PAD) & (items != target)
        users.append(np.broadcast_to(rows[:, None], items.shape)[is_rival])
        margins.append(compared.cpu().numpy()[is_rival])
    return DecidedPairs(np.concatenate(users), np.concatenate(margins))
