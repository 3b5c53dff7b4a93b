"""Exact scores, and the best items of a catalogue, by a product of vectors: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncr_core.ranking.backends.dense_kernel import compiled, compiled_fast

GROUP = 16  # the most scores of which only the largest is looked at first
GROUPS = 4  # the fewest groups for each of the best items
FEW = 64  # the most best items whose least score is found without a partition


@compiled_fast
def score_rows(users: Any, items: Any, bias: Any, rows: Any, offsets: Any, scores: Any) -> None:
    """Fills ``scores`` (T,) of ``rows`` (T,), rows of ``items``, with float64.

    The rows from ``offsets[b]`` to ``offsets[b + 1]`` are those of row b of ``users`` (B, D).
    ``items`` is (N, D), and ``bias`` (N or 0,). All compiled code that orders lists calls this
    function, so that a score does not depend on the batch: another loop could add in another order.
    """
    for user in range(len(offsets) - 1):
        for place in range(offsets[user], offsets[user + 1]):
            item = rows[place]
            score = 0.0
            for d in range(items.shape[1]):
                score += users[user, d] * items[item, d]
            scores[place] = score + bias[item] if len(bias) else score


@compiled
def kth_largest(values: Any, k: int) -> float:
    """The k-th largest of some numbers; −inf if there are fewer."""
    if k > len(values):
        return -np.inf
    if k > FEW:
        return float(np.partition(values, len(values) - k)[len(values) - k])
    top = np.full(k, -np.inf, values.dtype)  # descending
    for value in values:
        if value > top[k - 1]:
            slot = k - 1
            while slot > 0 and top[slot - 1] < value:
                top[slot] = top[slot - 1]
                slot -= 1
            top[slot] = value
    return float(top[k - 1])


@compiled
def near_best(scores: Any, k: int, error: float, error_by_length: float, users: Any) -> Any:
    """The items that may be among the best ``k``, as ``rows`` and ``offsets`` of ``score_rows``.

    ``scores`` (B, N) float32 are −inf for excluded items. Their error is at most ``error`` plus
    ``error_by_length`` times the length of the user's vector, a row of ``users`` (B, D).
    """
    n_users, n_items = scores.shape
    # Item i is in group i mod n_groups: a loop over groups is one over neighbouring scores.
    size = max(1, min(GROUP, n_items // (GROUPS * k)))
    n_groups = (n_items + size - 1) // size
    largest = np.empty(n_groups, np.float32)
    rows = np.empty(2 * k * n_users, np.int64)
    offsets = np.zeros(n_users + 1, np.int64)
    n_rows = 0
    for user in range(n_users):
        largest[:] = -np.inf
        for first in range(0, n_items, n_groups):
            part = scores[user, first : first + n_groups]
            for group in range(len(part)):
                largest[group] = max(largest[group], part[group])
        square_norm = 0.0
        for d in range(users.shape[1]):
            square_norm += np.float64(users[user, d]) * users[user, d]
        # As many items as groups have such a score: what is below is not among the best k.
        uncertain = error + error_by_length * np.sqrt(square_norm)
        least = np.float32(kth_largest(largest, k) - uncertain)
        for group in range(n_groups):
            if largest[group] < least or largest[group] == -np.inf:
                continue
            for i in range(group, n_items, n_groups):
                if scores[user, i] < least or scores[user, i] == -np.inf:
                    continue
                if n_rows == len(rows):
                    rows = np.concatenate((rows, np.empty_like(rows)))
                rows[n_rows] = i
                n_rows += 1
        offsets[user + 1] = n_rows
    return rows[:n_rows], offsets


@compiled
def best_rows(rows: Any, offsets: Any, scores: Any, order: Any, tie: float, best: Any) -> None:
    """Fills ``best`` (B, k) with the rows of the largest scores, padded with −1.

    ``scores`` are those of ``score_rows``, and are rounded to multiples of ``tie``. ``order``
    (N or 0,) decides between equal scores; without ``order`` the row decides.
    """
    n_users, k = best.shape
    for user in range(n_users):
        own = rows[offsets[user] : offsets[user + 1]]
        rounded = np.rint(scores[offsets[user] : offsets[user + 1]] / tie)
        sort = np.argsort(-rounded)
        start = 0
        while start < len(sort):
            stop = start + 1
            while stop < len(sort) and rounded[sort[stop]] == rounded[sort[start]]:
                stop += 1
            if stop > start + 1:
                tied = sort[start:stop].copy()
                places = order[own[tied]] if len(order) else own[tied]
                sort[start:stop] = tied[np.argsort(places)]
            start = stop
        length = min(k, len(own))
        best[user, :length] = own[sort[:length]]
        best[user, length:] = -1


def compile_all() -> None:
    """Compiles the functions for the types of their calls."""
    nothing, order, items = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((1, 0))
    scores, best = np.zeros((1, 1), dtype=np.float32), np.zeros((1, 1), dtype=np.int64)
    exact = np.zeros(1)
    for users in (np.zeros((1, 0)), np.zeros((1, 0), dtype=np.float32)):
        rows, offsets = near_best(scores, 1, 0.0, 0.0, users)
        score_rows(users, items, nothing, rows, offsets, exact)
    best_rows(rows, offsets, exact, order, 1.0, best)
