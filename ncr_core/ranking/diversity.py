"""A list with more variety: maximal marginal relevance over a ranked list.

Carbonell & Goldstein, The use of MMR, diversity-based reranking (SIGIR'98), with the item's place
in the ranked list for its relevance: an order by pairwise comparison has no scores to go by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def diversified(vectors: NDArray[np.float32], n: int, diversity: float) -> NDArray[np.int64]:
    """Which ``n`` places of a ranked list to show, and in which order.

    ``vectors`` (P, D) stand for the items of the list, best first; their products are similarities,
    1 for an item and itself. The item taken next is the one with the largest

        (1 − diversity)·(1 − r/P) − diversity·max(0, its highest similarity to those taken)

    where r is its place from 0; of equal ones the first. The first place therefore always stays,
    and with a diversity of 0 all do. Returns (min(n, P),) places from 0.
    """
    p = len(vectors)
    n = min(n, p)
    if diversity <= 0.0 or n <= 1:
        return np.arange(n, dtype=np.int64)
    relevance = (1.0 - diversity) * (1.0 - np.arange(p) / p)
    nearest = np.zeros(p)
    left = np.ones(p, dtype=np.bool_)
    chosen = np.zeros(n, dtype=np.int64)
    for at in range(n):
        value = np.where(left, relevance - diversity * nearest, -np.inf)
        best = int(value.argmax())
        chosen[at], left[best] = best, False
        np.maximum(nearest, vectors @ vectors[best], out=nearest)
    return chosen
