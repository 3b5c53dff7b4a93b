"""Evidence of users, and the pairs of items that the fold-in fits a user's vector to."""

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
    """Parameters of fold-in, chosen on MovieLens 1M (`python -m benchmarks.fold_in`).

    Raises ConfigError for a value out of range.
    """

    strength: float = 3.0
    """The factor of an event of weight 1 in the loss, shared by the event's pairs. A larger factor
    moves a vector further from the prior's mean."""

    half_life: float = 20.0
    """The number of later events after which an event counts half; 0: all events count alike."""

    dislike: float = 2.0
    """The weight of a dislike of weight 1, in events."""

    stated: float = 1.0
    """The weight of a stated preference, in events."""

    crowd: float = 1.25
    """The weight of a new item's losses to the bars of other users, relative to the weight of its
    wins; 0: no losses count."""

    shown: float = 0.11
    """The share of the trained users who have a new item above their bar, see ``ItemFoldIn``."""

    prior_items: float = 2.0
    """The number of items whose pooled vector counts as much as the vector that attributes
    predict."""

    pairs: int = 768
    """The largest number of pairs of a user's events, approximately. Each event has the same number
    of pairs, at most ``negatives``."""

    negatives: int = 64
    """The largest number of items that an event is compared with."""

    events: int = 256
    """The number of a user's latest events that count."""

    steps: int = 12
    """The largest number of Newton steps."""

    tolerance: float = 0.2
    """The fit stops when a step promises a smaller decrease of the loss, in nats."""

    seed: int = 0
    """The seed of the drawn items and users."""

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
    """(k,) the items that the user took up, oldest first."""
    weights: FloatArray | None = None
    """(k,) the weights of ``items``, above 0; None: 1 each."""
    disliked: IntArray = field(default_factory=lambda: _NO_ITEMS)
    """(d,) the items that the user dislikes. An item that is also in ``items`` counts as
    disliked."""
    disliked_weights: FloatArray | None = None
    """(d,) the weights of ``disliked``, above 0; None: 1 each."""
    pairs: IntArray = field(default_factory=lambda: _NO_PAIRS)
    """(p, 2) winners and losers of the user's stated preferences."""

    def __len__(self) -> int:
        return len(self.items) + len(self.disliked) + len(self.pairs)

    def check(self, n_items: int) -> None:
        """Raises IndexError for an item that the model does not have, DataError for other faults.

        Compiled code does not check its indices.
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
        """The evidence with only the liked items that a mask (k,) keeps."""
        weights = None if self.weights is None else self.weights[mask]
        return replace(self, items=self.items[mask], weights=weights)


def user_evidence(
    data: Interactions, users: Iterable[int], item_rows: IntArray | None = None
) -> list[Evidence]:
    """The evidence of some users, by their rows in ``data``.

    ``item_rows`` (n_items,) are the model's rows of the data's items; by default the data's own
    rows.
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
    """An index, by user, of rows whose first column is the user."""

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
    """(P,) winners, losers, and the weights of the pairs."""

    winners: IntArray
    losers: IntArray
    weights: npt.NDArray[np.float64]


class PairSampler:
    """Makes pairs from a user's evidence and from items that are drawn once a model.

    The pairs depend on the user's own evidence alone, and not on other users of a batch. The order
    of events has an effect only by the events' age.
    """

    def __init__(self, n_items: int, config: FoldInConfig) -> None:
        self._config = config
        drawn = np.random.default_rng(config.seed).permutation(n_items)
        self._shared: IntArray = drawn[:SHARED].astype(np.int64)

    def sample(self, evidence: Evidence, *, likes: bool = True) -> WeightedPairs:
        """All pairs; without ``likes`` only the pairs of dislikes and stated preferences."""
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
        """The liked items that count, in the order of their rows, with their weights."""
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
        """Pairs in which each liked item beats its part of the shared items."""
        n = min(self._config.negatives, max(1, self._config.pairs // len(items)))
        losers = self._drawn(items, n)
        known = np.union1d(items, disliked)
        return _spread(items, losers, ~_is_in(losers, known), weights * self._config.strength)

    def _disliked(self, evidence: Evidence, items: IntArray) -> WeightedPairs:
        """Pairs in which liked items and a part of the shared items beat each disliked item."""
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
        """(k,) items → (k, n) shared items, which depend on the item."""
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
    """Pairs of (k,) items with the (k, n) others that count; an item's pairs share its weight."""
    each = weights / np.maximum(1, counts.sum(axis=1))
    place = np.flatnonzero(counts)
    row = place // others.shape[1]
    return WeightedPairs(items[row], others.ravel()[place], each[row])


def _is_in(items: IntArray, known: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each of the items is among the known items, which are ascending."""
    at = np.minimum(np.searchsorted(known, items), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == items
    return found


def _weights(given: FloatArray | None, n: int) -> npt.NDArray[np.float64]:
    return np.ones(n) if given is None else given.astype(np.float64)
