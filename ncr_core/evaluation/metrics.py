"""HR@K and NDCG@K with one held-out item a user (He et al. 2017)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import IntArray

FloatArray = npt.NDArray[np.float64]


def held_out_ranks(ranked: IntArray, held_out: IntArray) -> IntArray:
    """(B, K) ranked items and (B,) held-out items → (B,) ranks from 0, or −1 outside the K."""
    hits = ranked == held_out[:, None]
    return np.where(hits.any(axis=1), hits.argmax(axis=1), -1)


def hit_ratio(ranks: IntArray, k: int) -> float:
    """The share of users whose held-out item is among the first k."""
    return float(np.mean(hit_of_each(ranks, k)))


def ndcg(ranks: IntArray, k: int) -> float:
    """The mean of 1 / log₂(rank + 2), 0 where the held-out item is not among the first k."""
    return float(np.mean(ndcg_of_each(ranks, k)))


def hit_of_each(ranks: IntArray, k: int) -> FloatArray:
    """HR@k of each user: 1 where the held-out item is among the first k, else 0."""
    return ((ranks >= 0) & (ranks < k)).astype(np.float64)


def ndcg_of_each(ranks: IntArray, k: int) -> FloatArray:
    """NDCG@k of each user."""
    inside = (ranks >= 0) & (ranks < k)
    return np.where(inside, 1.0 / np.log2(np.where(inside, ranks, 0) + 2.0), 0.0)
