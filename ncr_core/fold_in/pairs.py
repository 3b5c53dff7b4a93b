"""The pairs of items that a user's vector is fitted to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncr_core.fold_in.evidence import Evidence, FloatArray, IntArray
from ncr_core.fold_in.settings import FoldInConfig

SHARED = 1024  # items that all users' events are compared with
LEAST_SHARE = 0.01  # of the latest event's: what counts less for its age is left out
SCATTER = 7919  # where in the shared items an event's begin: a prime, so that places differ
OPPONENTS = 16  # liked items that a disliked one loses to


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """(P,) winners, losers, and what each pair counts."""

    winners: IntArray
    losers: IntArray
    weights: npt.NDArray[np.float64]


class PairMaker:
    """Makes pairs of what is known of a user, and of items drawn once a model.

    They depend on nothing but the user's own evidence: not on who else is fitted, and on the order
    of events only by their age.
    """

    def __init__(self, n_items: int, config: FoldInConfig) -> None:
        self._config = config
        drawn = np.random.default_rng(config.seed).permutation(n_items)
        self._shared: IntArray = drawn[:SHARED].astype(np.int64)

    def of(self, evidence: Evidence, *, likes: bool = True) -> Pairs:
        """All pairs; without ``likes`` those of dislikes and stated preferences alone."""
        config = self._config
        items, weights = self.counted(evidence)
        parts: list[Pairs] = []
        if likes and len(items):
            parts.append(self._liked(items, weights, evidence.disliked))
        if len(evidence.disliked):
            parts.append(self._disliked(evidence, items))
        if len(evidence.pairs):
            stated = np.full(len(evidence.pairs), config.strength * config.stated)
            parts.append(Pairs(evidence.pairs[:, 0], evidence.pairs[:, 1], stated))
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Pairs(none, none, np.zeros(0))
        return Pairs(
            np.concatenate([part.winners for part in parts]),
            np.concatenate([part.losers for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )

    def counted(self, evidence: Evidence) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """What counts of the liked items, by row, with its weight."""
        items, weights = evidence.items, _weights(evidence.weights, len(evidence.items))
        if len(evidence.disliked):
            kept = ~np.isin(items, evidence.disliked)
            items, weights = items[kept], weights[kept]
        if self._config.half_life:
            age = np.arange(len(items))[::-1] / self._config.half_life
            share = 0.5**age
            recent = share >= LEAST_SHARE
            items, weights = items[recent], weights[recent] * share[recent]
        items, weights = items[-self._config.events :], weights[-self._config.events :]
        by_row = np.argsort(items, kind="stable")
        return items[by_row], weights[by_row]

    def _liked(
        self, items: IntArray, weights: npt.NDArray[np.float64], disliked: IntArray
    ) -> Pairs:
        """Each liked item beats its own part of the shared ones."""
        n = min(self._config.negatives, max(1, self._config.pairs // len(items)))
        losers = self._drawn(items, n)
        known = np.union1d(items, disliked)
        return _spread(items, losers, ~_is_in(losers, known), weights * self._config.strength)

    def _disliked(self, evidence: Evidence, items: IntArray) -> Pairs:
        """Each disliked item loses to liked ones, and to its own part of the shared ones."""
        disliked = evidence.disliked
        weights = _weights(evidence.disliked_weights, len(disliked))
        config = self._config
        n = min(OPPONENTS, max(1, config.pairs // len(disliked)))
        winners = self._drawn(disliked, n)
        if len(items):
            start = (disliked * SCATTER) % len(items)
            step = max(1, len(items) // n)
            own = items[(start[:, None] + np.arange(min(n, len(items))) * step) % len(items)]
            winners = np.concatenate([own, winners], axis=1)
        strength = weights * config.strength * config.dislike
        pairs = _spread(disliked, winners, ~_is_in(winners, np.unique(disliked)), strength)
        return Pairs(pairs.losers, pairs.winners, pairs.weights)

    def _drawn(self, items: IntArray, n: int) -> IntArray:
        """(k,) items → (k, n) of the shared ones, which by the item are others."""
        shared = len(self._shared)
        n = min(n, shared)
        start = (items * SCATTER) % shared
        drawn: IntArray = self._shared[
            (start[:, None] + np.arange(n) * max(1, shared // n)) % shared
        ]
        return drawn


def _spread(
    items: IntArray,
    others: IntArray,
    counts: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.float64],
) -> Pairs:
    """Pairs of (k,) items with those of (k, n) others that count, which share the item's weight."""
    each = weights / np.maximum(1, counts.sum(axis=1))
    place = np.flatnonzero(counts)
    row = place // others.shape[1]
    return Pairs(items[row], others.ravel()[place], each[row])


def _is_in(items: IntArray, known: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each of the items is among the known ones, which are ascending."""
    at = np.minimum(np.searchsorted(known, items), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == items
    return found


def _weights(given: FloatArray | None, n: int) -> npt.NDArray[np.float64]:
    return np.ones(n) if given is None else given.astype(np.float64)
