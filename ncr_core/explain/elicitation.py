"""Elicitation: the pairs of items whose answers tell most about a user's taste.

A sample of trained users stands for the possible tastes of a user, and gives the possible answers.
A pair tells much if the tastes disagree about the pair and each taste is sure, as in active
learning by disagreement (Houlsby et al. 2011). A pair tells little if earlier pairs tell the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.data.interactions import BoolArray, IntArray
from ncr_core.ranking.ranker import ExactRanker

USERS_AT_ONCE = 16  # users whose margins are computed together
MIN_PLAUSIBLE = 24.0  # tastes, in effect, however much is known: it is but a sample
EVENTS_TO_HALVE = 5.0
JITTER = 0.05  # users of whom as much is known are not all asked the same

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairQuestion:
    """A pair of item rows, and the expected bits of its answer beyond the other answers."""

    a: int
    b: int
    information: float


class QuestionPool:
    """All pairs of (M,) item rows, as (S,) sampled users of the vectors (S, E) would answer them.

    The construction takes S·M² margins; a choice takes milliseconds. P(a over b) = σ(margin / 2T),
    where T is the ``temperature``.
    """

    def __init__(
        self, ranker: ExactRanker, sample: Tensor, items: IntArray, temperature: float = 1.0
    ) -> None:
        self.items = items
        self._position = {row: position for position, row in enumerate(items.tolist())}
        self._first, self._second = np.triu_indices(len(items), 1)
        rows = torch.from_numpy(items)
        margins_by_user: list[Floats] = []
        with torch.inference_mode():
            for users in torch.split(sample, USERS_AT_ONCE):
                margins = ranker.bind(users).margins.all_margins(rows.expand(len(users), -1)).cpu()
                margins_by_user.append(margins[:, self._first, self._second].float().numpy())
        # (Q, S), so that all that is asked of a pair lies together.
        pairs_by_taste = np.ascontiguousarray(np.concatenate(margins_by_user).T)
        self._answers: Floats = 0.5 + 0.5 * np.tanh(pairs_by_taste / np.float32(4.0 * temperature))
        self._doubts = _entropy(self._answers)
        vectors = sample.cpu().double().numpy()
        self._spread = np.maximum(vectors.std(axis=0), 1e-12)
        self._tastes = vectors / self._spread

    def plausible(
        self,
        stated: IntArray | None = None,
        vector: npt.NDArray[np.floating] | None = None,
        events: int = 0,
    ) -> Doubles:
        """(S,) the plausibility of each taste for a user, with the sum 1.

        ``stated`` (P, 2) are winners and losers of the user's preferences. A taste is more
        plausible if these answers are more probable with it. ``vector`` (E,) is the user's vector,
        fitted to ``events`` events. Tastes near the vector are more plausible; more events leave
        fewer plausible tastes.
        """
        log_weights = np.zeros(self._answers.shape[1])
        if vector is not None and events:
            distance = ((self._tastes - vector / self._spread) ** 2).sum(axis=1)
            near = 1e3 / max(float(np.ptp(distance)), 1e-12)
            left = len(distance) / (1 + events / EVENTS_TO_HALVE)
            log_weights = _tempered(-near * distance, left)
        if stated is not None:
            for winner, loser in stated.tolist():
                pair, turned = self._number(winner, loser)
                if pair >= 0:
                    p = self._answers[pair]
                    log_weights += np.log(np.clip(1 - p if turned else p, 1e-7, 1))
        return _normed(_tempered(log_weights, MIN_PLAUSIBLE))

    def _number(self, one: int, other: int) -> tuple[int, bool]:
        """The number of a pair of rows, −1 if unknown, and whether its order is reversed."""
        i, j = (self._position.get(row, -1) for row in (one, other))
        if min(i, j) < 0 or i == j:
            return -1, False
        low, high = min(i, j), max(i, j)
        return low * len(self.items) - low * (low + 1) // 2 + high - low - 1, i > j

    def choose(
        self,
        n: int,
        allowed: BoolArray,
        asked: Collection[tuple[int, int]] = (),
        plausible: Doubles | None = None,
        seed: int = 0,
    ) -> list[PairQuestion]:
        """At most ``n`` pairs of the ``allowed`` (M,) items, the most telling first.

        ``asked`` are pairs of rows, in either order, that are not asked again. No item comes twice
        while there are pairs of other items. The same ``seed`` gives the same questions.
        """
        a, b = self.items[self._first], self.items[self._second]
        open_pairs: BoolArray = allowed[self._first] & allowed[self._second]
        numbers = [self._number(one, other)[0] for one, other in asked]
        open_pairs[[number for number in numbers if number >= 0]] = False
        if plausible is None:
            plausible = np.full(self._answers.shape[1], 1 / self._answers.shape[1])
        weights = plausible.astype(np.float32)
        mean = _weighted(self._answers, weights)
        information = np.maximum(_entropy(mean) - _weighted(self._doubts, weights), 0.0)
        variance = np.maximum(np.einsum("qs,qs,s->q", self._answers, self._answers, weights), 0)
        variance = np.maximum(variance - mean**2, 1e-9)
        noise = np.maximum(mean * (1 - mean) - variance, 1e-6)
        varied = 1 + JITTER * np.random.default_rng(seed).random(len(mean))
        # As if the answers were normal: what is left of their variance, given those chosen.
        left, known = variance.copy(), list[Floats]()
        chosen: list[PairQuestion] = []
        fresh = np.ones(len(mean), dtype=np.bool_)
        while len(chosen) < n and open_pairs.any():
            if not (open_pairs & fresh).any():
                fresh[:] = True
            telling = information * left / variance
            pair = int(np.where(open_pairs & fresh, telling * varied, -1.0).argmax())
            chosen.append(PairQuestion(int(a[pair]), int(b[pair]), float(telling[pair])))
            open_pairs[pair] = False
            positions = (self._first[pair], self._second[pair])
            fresh &= ~(np.isin(self._first, positions) | np.isin(self._second, positions))
            # Cholesky, a pivot a question; the answer has its noise.
            shared = _weighted(self._answers, weights * (self._answers[pair] - mean[pair]))
            for before in known:
                shared -= before[pair] * before
            known.append(shared / np.sqrt(left[pair] + noise[pair]))
            left = np.maximum(left - known[-1] ** 2, 0.0)
        return chosen


def _normed(log_weights: Doubles) -> Doubles:
    weights = np.exp(log_weights - log_weights.max())
    normed: Doubles = weights / weights.sum()
    return normed


def _tempered(log_weights: Doubles, wanted: float) -> Doubles:
    """τ·w with the largest τ ≤ 1 that leaves ``wanted`` tastes in effect: 1/Σ weights²."""

    def enough(temper: float) -> bool:
        left = 1 / float((_normed(temper * log_weights) ** 2).sum())
        return left >= min(wanted, 0.999 * len(log_weights))

    if enough(1.0):
        return log_weights
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low * log_weights


def _weighted(pairs_by_taste: Floats, weights: Floats) -> Floats:
    """(Q, S) and (S,) → (Q,), by one thread.

    BLAS would take all threads, and concurrent requests would slow each other down.
    """
    weighted: Floats = np.einsum("qs,s->q", pairs_by_taste, weights)
    return weighted


def _entropy(p: Floats) -> Floats:
    """The entropy of answers with these probabilities, in bits."""
    p = np.clip(p, 1e-7, 1 - 1e-7)
    entropy: Floats = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return entropy
