"""What is known of a user, and the pairs of items that the user's vector is fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray, Interactions, UserFeedback
from ncr_core.errors import ConfigError, DataError


@dataclass(frozen=True)
class FoldInConfig:
    """Choices of fold-in, made on MovieLens 1M (`python -m benchmarks.fold_in`).

    Raises ConfigError where they do not fit.
    """

    strength: float = 3.0
    """What an event of weight 1 counts beside the prior, in nats a pair: what tells a newcomer's
    vector from the trained users'."""

    half_life: float = 20.0
    """After how many later events one counts half; 0: all count alike."""

    dislike: float = 2.0
    """What a dislike of weight 1 counts, in events."""

    stated: float = 1.0
    """What a stated preference counts, in events."""

    crowd: float = 1.25
    """How much the losses of a new item to what others like count, beside its wins; 0: not."""

    shown: float = 0.11
    """The share of the trained users who have a new item above their bar, see ``ItemFoldIn``."""

    prior_items: float = 2.0
    """The items whose pooled vector counts as much as the vector that attributes predict."""

    pairs: int = 768
    """Pairs a user, at most about: each event is compared with so many items that as many come
    together, ``negatives`` at most."""

    negatives: int = 64
    """Items that an event is compared with, at most."""

    events: int = 256
    """Of a user's events so many count, the latest."""

    steps: int = 12
    """Newton steps, at most."""

    tolerance: float = 0.2
    """Stops when a step promises less than so much of the loss, in nats."""

    seed: int = 0
    """Of the items that are compared with."""

    def __post_init__(self) -> None:
        for name in ("strength", "dislike", "stated", "tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        for name in ("half_life", "crowd", "prior_items"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, not {getattr(self, name)}")
        if not 0 < self.shown < 1:
            raise ConfigError(f"shown must be between 0 and 1, not {self.shown}")
        for name in ("pairs", "negatives", "events", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


FloatArray = npt.NDArray[np.floating]

_NO_ITEMS: IntArray = np.zeros(0, dtype=np.int64)
_NO_PAIRS: IntArray = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Likes, dislikes and stated preferences of one user. All items are rows of the model."""

    items: IntArray = field(default_factory=lambda: _NO_ITEMS)
    """(k,) what the user took up, oldest first."""
    weights: FloatArray | None = None
    """(k,) how much each of them counts, above 0; None: 1 each."""
    disliked: IntArray = field(default_factory=lambda: _NO_ITEMS)
    """(d,) what the user does not want. An item that is also in ``items`` counts as disliked."""
    disliked_weights: FloatArray | None = None
    """(d,) how much, above 0; None: 1 each."""
    pairs: IntArray = field(default_factory=lambda: _NO_PAIRS)
    """(p, 2) winners and losers that the user stated."""

    def __len__(self) -> int:
        return len(self.items) + len(self.disliked) + len(self.pairs)

    def check(self, n_items: int) -> None:
        """Raises IndexError for an item that the model does not have, DataError for the rest.

        Compiled code reads whatever memory it is told to.
        """
        if self.pairs.ndim != 2 or self.pairs.shape[1] != 2:
            raise DataError(f"stated pairs must be (p, 2), not {self.pairs.shape}")
        for rows in (self.items, self.disliked, self.pairs):
            if rows.size and (rows.min() < 0 or rows.max() >= n_items):
                wrong = int(rows.min() if rows.min() < 0 else rows.max())
                raise IndexError(f"no item has the row {wrong}: there are {n_items:,}")
        if (self.pairs[:, 0] == self.pairs[:, 1]).any():
            raise DataError("an item cannot be preferred to itself")
        for rows, weights in (
            (self.items, self.weights),
            (self.disliked, self.disliked_weights),
        ):
            if weights is None:
                continue
            if weights.shape != rows.shape:
                raise DataError(f"{len(rows)} items, but weights of shape {weights.shape}")
            if not (np.isfinite(weights) & (weights > 0)).all():
                raise DataError("weights must be finite and above 0")

    def of_first(self, n_items: int) -> Evidence:
        """The evidence without the liked items beyond the first ``n_items`` rows."""
        is_first = self.items < n_items
        return self if is_first.all() else self.of(is_first)

    def of(self, mask: npt.NDArray[np.bool_]) -> Evidence:
        """The evidence with those of the liked items alone that a mask (k,) keeps."""
        weights = None if self.weights is None else self.weights[mask]
        return replace(self, items=self.items[mask], weights=weights)


def user_evidence(
    data: Interactions, users: Iterable[int], item_rows: IntArray | None = None
) -> list[Evidence]:
    """The evidence of some users, by their rows in ``data``.

    ``item_rows`` (n_items,) are the model's rows of the items, where they are not the data's own.
    """
    rows = np.arange(data.n_items) if item_rows is None else item_rows
    feedback = data.feedback or UserFeedback()
    disliked, pairs = _UserRows(feedback.disliked), _UserRows(feedback.pairs)
    evidence = []
    for user in users:
        liked = slice(data.indptr[user], data.indptr[user + 1])
        disliked_rows = disliked.of_user(user)
        evidence.append(
            Evidence(
                items=rows[data.items[liked]],
                weights=None if data.weights is None else data.weights[liked],
                disliked=rows[feedback.disliked[disliked_rows, 1]],
                disliked_weights=feedback.disliked_weights[disliked_rows],
                pairs=rows[feedback.pairs[pairs.of_user(user), 1:]],
            )
        )
    return evidence


class _UserRows:
    """Rows that begin with a user, found by the user."""

    def __init__(self, rows: IntArray) -> None:
        self._order = np.argsort(rows[:, 0], kind="stable")
        self._users = rows[self._order, 0]

    def of_user(self, user: int) -> IntArray:
        first, last = np.searchsorted(self._users, [user, user + 1])
        result: IntArray = self._order[first:last]
        return result


SHARED = 1024  # items that all users' events are compared with
MIN_SHARE = 0.01  # of the latest event's: what counts less for its age is left out
SCATTER = 7919  # where in the shared items an event's begin: a prime, so that places differ
OPPONENTS = 16  # liked items that a disliked one loses to


@dataclass(frozen=True, slots=True, eq=False)
class WeightedPairs:
    """(P,) winners, losers, and what each pair counts."""

    winners: IntArray
    losers: IntArray
    weights: npt.NDArray[np.float64]


class PairSampler:
    """Makes pairs of what is known of a user, and of items drawn once a model.

    They depend on nothing but the user's own evidence: not on who else is fitted, and on the order
    of events only by their age.
    """

    def __init__(self, n_items: int, config: FoldInConfig) -> None:
        self._config = config
        drawn = np.random.default_rng(config.seed).permutation(n_items)
        self._shared: IntArray = drawn[:SHARED].astype(np.int64)

    def sample(self, evidence: Evidence, *, likes: bool = True) -> WeightedPairs:
        """All pairs; without ``likes`` those of dislikes and stated preferences alone."""
        config = self._config
        items, weights = self.weighted_items(evidence)
        parts: list[WeightedPairs] = []
        if likes and len(items):
            parts.append(self._liked(items, weights, evidence.disliked))
        if len(evidence.disliked):
            parts.append(self._disliked(evidence, items))
        if len(evidence.pairs):
            stated = np.full(len(evidence.pairs), config.strength * config.stated)
            parts.append(WeightedPairs(evidence.pairs[:, 0], evidence.pairs[:, 1], stated))
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return WeightedPairs(none, none, np.zeros(0))
        return WeightedPairs(
            np.concatenate([part.winners for part in parts]),
            np.concatenate([part.losers for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )

    def weighted_items(self, evidence: Evidence) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """What counts of the liked items, by row, with its weight."""
        items, weights = evidence.items, _weights(evidence.weights, len(evidence.items))
        if len(evidence.disliked):
            kept = ~np.isin(items, evidence.disliked)
            items, weights = items[kept], weights[kept]
        if self._config.half_life:
            age = np.arange(len(items))[::-1] / self._config.half_life
            share = 0.5**age
            recent = share >= MIN_SHARE
            items, weights = items[recent], weights[recent] * share[recent]
        items, weights = items[-self._config.events :], weights[-self._config.events :]
        by_row = np.argsort(items, kind="stable")
        return items[by_row], weights[by_row]

    def _liked(
        self, items: IntArray, weights: npt.NDArray[np.float64], disliked: IntArray
    ) -> WeightedPairs:
        """Each liked item beats its own part of the shared ones."""
        n = min(self._config.negatives, max(1, self._config.pairs // len(items)))
        losers = self._drawn(items, n)
        known = np.union1d(items, disliked)
        return _spread(items, losers, ~_is_in(losers, known), weights * self._config.strength)

    def _disliked(self, evidence: Evidence, items: IntArray) -> WeightedPairs:
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
        return WeightedPairs(pairs.losers, pairs.winners, pairs.weights)

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
) -> WeightedPairs:
    """Pairs of (k,) items with those of (k, n) others that count, which share the item's weight."""
    each = weights / np.maximum(1, counts.sum(axis=1))
    place = np.flatnonzero(counts)
    row = place // others.shape[1]
    return WeightedPairs(items[row], others.ravel()[place], each[row])


def _is_in(items: IntArray, known: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each of the items is among the known ones, which are ascending."""
    at = np.minimum(np.searchsorted(known, items), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == items
    return found


def _weights(given: FloatArray | None, n: int) -> npt.NDArray[np.float64]:
    return np.ones(n) if given is None else given.astype(np.float64)
