"""Metrics by the time between a user's last item and the held-out item."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ncr_core.data.interactions import IntArray, TimeArray
from ncr_core.data.splits import TemporalSplit
from ncr_core.evaluation.protocols import K, Metrics, Ranks, full_ranks

HOUR, DAY = 3_600.0, 86_400.0
GROUPS: dict[str, tuple[float, float]] = {
    "up to 1 h": (-np.inf, HOUR),
    "1 h to 1 day": (HOUR, DAY),
    "1 to 30 days": (DAY, 30 * DAY),
    "over 30 days": (30 * DAY, np.inf),
}
"""The name of each group → the bounds of its gaps in seconds: above the first, at most the
second."""


def metrics_by_gap(ranks: IntArray, gaps: TimeArray, items: int, k: int = K) -> dict[str, Metrics]:
    """HR and NDCG of all users, and of each group with users.

    Args:
        ranks: (n,) ranks of the held-out items from 0, −1 outside the first k.
        gaps: (n,) seconds since each user's last item.
        items: the largest number of items that were ranked for a user.
        k: the length of the lists.
    """

    def of(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Metrics:
        return Metrics.of(ranks[mask], items, k)

    found = {"all": of(np.ones(len(ranks), dtype=np.bool_))}
    for name, (low, high) in GROUPS.items():
        mask = (gaps > low) & (gaps <= high)
        if mask.any():
            found[name] = of(mask)
    return found


def evaluate_temporal(
    model: Ranks,
    split: TemporalSplit,
    seed: int = 0,
    *,
    on_users: Callable[[int], None] | None = None,
) -> dict[str, Metrics]:
    """Metrics of users' first items after the cut over all items, by the gap before these items.

    The model ranks with its own vectors of users. A model that pools users from
    ``split.test_input`` uses their items before the cut, the validation item included.
    """
    ranks, items = full_ranks(model, split, split.test, seed, on_users=on_users)
    return metrics_by_gap(ranks, split.gaps[split.test >= 0], items)
