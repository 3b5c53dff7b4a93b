"""Scores of candidates, and the best items of a catalogue, by a product of vectors: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncr_core.ranking.backends.dense_kernel import compiled

GROUP = 16  # scores of which only the largest is looked at first


@compiled
def exact_score(users: Any, items: Any, bias: Any, user: int, item: int) -> float:
    """The score in float64, the same for every batch; arguments as of ``best_by_product``."""
    width = items.shape[1]
    # Four sums: each addition of one has to wait for the last.
    one, two, three, four = bias[item] if len(bias) else 0.0, 0.0, 0.0, 0.0
    for d in range(0, width - 3, 4):
        one += users[user, d] * items[item, d]
        two += users[user, d + 1] * items[item, d + 1]
        three += users[user, d + 2] * items[item, d + 2]
        four += users[user, d + 3] * items[item, d + 3]
    for d in range(width - width % 4, width):
        one += users[user, d] * items[item, d]
    return (one + two) + (three + four)


@compiled
def score_candidates(users: Any, items: Any, bias: Any, candidates: Any, scores: Any) -> None:
    """Fills ``scores`` (B, M) of the ``candidates`` (B, M), rows of ``items``, with float64."""
    for user in range(candidates.shape[0]):
        for place in range(candidates.shape[1]):
            scores[user, place] = exact_score(users, items, bias, user, candidates[user, place])


@compiled
def best_by_product(
    scores: Any,
    error: float,
    error_by_length: float,
    users: Any,
    items: Any,
    bias: Any,
    order: Any,
    tie: float,
    best: Any,
) -> None:
    """Fills ``best`` (B, k) with item rows, padded with −1.

    ``scores`` (B, N) float32 are −inf for excluded items. Their error is at most ``error`` plus
    ``error_by_length`` times the length of the user's vector. Scores that may be among the best k
    are computed again from ``users`` (B, D), ``items`` (N, D) and ``bias`` (N or 0,) in float64,
    rounded to multiples of ``tie``. ``order`` (N or 0,) decides between equal scores; without
    ``order`` the row decides.
    """
    n_users, n_items = scores.shape
    k, width = best.shape[1], items.shape[1]
    # Item i is in group i mod n_groups: a loop over groups is one over neighbouring scores.
    n_groups = (n_items + GROUP - 1) // GROUP
    largest, top = np.empty(n_groups, np.float32), np.empty(k, np.float32)
    exact, places = np.empty(k), np.empty(k, np.int64)
    for user in range(n_users):
        largest[:] = -np.inf
        for first in range(0, n_items, n_groups):
            part = scores[user, first : first + n_groups]
            for group in range(len(part)):
                largest[group] = max(largest[group], part[group])
        n_kept = 0  # of ``top``: the largest of all groups, descending
        for score in largest:
            if score > -np.inf and (n_kept < k or score > top[k - 1]):
                slot = min(n_kept, k - 1)
                n_kept = min(n_kept + 1, k)
                while slot > 0 and top[slot - 1] < score:
                    top[slot] = top[slot - 1]
                    slot -= 1
                top[slot] = score
        # As many groups hold something as large, and so what is below cannot be among the best k.
        square_norm = 0.0
        for d in range(width):
            square_norm += np.float64(users[user, d]) * users[user, d]
        uncertain = error + error_by_length * np.sqrt(square_norm)
        least = np.float32(top[k - 1] - uncertain if n_kept == k else -np.inf)
        n_kept = 0
        for group in range(n_groups):
            if largest[group] < least or largest[group] == -np.inf:
                continue
            for i in range(group, n_items, n_groups):
                if scores[user, i] < least or scores[user, i] == -np.inf:
                    continue
                score = np.rint(exact_score(users, items, bias, user, i) / tie)
                place = order[i] if len(order) else i
                if n_kept == k and (
                    exact[k - 1] > score or (exact[k - 1] == score and places[k - 1] < place)
                ):
                    continue
                slot = min(n_kept, k - 1)
                n_kept = min(n_kept + 1, k)
                while slot > 0 and (
                    exact[slot - 1] < score
                    or (exact[slot - 1] == score and places[slot - 1] > place)
                ):
                    exact[slot], places[slot] = exact[slot - 1], places[slot - 1]
                    best[user, slot] = best[user, slot - 1]
                    slot -= 1
                exact[slot], places[slot], best[user, slot] = score, place, i
        for j in range(n_kept, k):
            best[user, j] = -1


def compile_all() -> None:
    """Compiles the functions for the types of their calls."""
    nothing, order, items = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((1, 0))
    scores, best = np.zeros((1, 1), dtype=np.float32), np.zeros((1, 1), dtype=np.int64)
    for users in (np.zeros((1, 0)), np.zeros((1, 0), dtype=np.float32)):
        best_by_product(scores, 0.0, 0.0, users, items, nothing, order, 1.0, best)
        score_candidates(users, items, nothing, best, np.zeros((1, 1)))
