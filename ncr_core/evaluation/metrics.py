"""HR, recall and NDCG of lists, and the overlap of two lists.

A user has one held-out item (He et al. 2017), or a set of them (He et al. 2020, LightGCN).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from ncr_core.data.interactions import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]

K = 10
"""The length of lists in metrics, by default."""


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


def hits_of_each(ranked: IntArray, items: IntArray, indptr: IntArray) -> BoolArray:
    """Whether each ranked item is one of the user's held-out items.

    Args:
        ranked: (B, K) ranked items, padded with −1.
        items: (n,) the held-out items of all users, user by user.
        indptr: (B + 1,) the place in ``items`` of each user's first item, and n.
    """
    return np.stack(
        [
            np.isin(row, items[start:end])
            for row, start, end in zip(ranked, indptr[:-1], indptr[1:], strict=True)
        ]
    )


def recall_of_each(hits: BoolArray, sizes: IntArray) -> FloatArray:
    """(B, K) hits, (B,) numbers of held-out items → (B,) the shares of these items among the K.

    Each user has at least one held-out item.
    """
    recall: FloatArray = hits.sum(axis=1) / sizes
    return recall


def set_ndcg_of_each(hits: BoolArray, sizes: IntArray) -> FloatArray:
    """(B, K) hits, (B,) numbers of held-out items → (B,) NDCG@K.

    The gain of a hit at rank r from 0 is 1 / log₂(r + 2). The divisor is the gain of the best list,
    whose first places are all hits. Each user has at least one held-out item.
    """
    gains = 1.0 / np.log2(np.arange(hits.shape[1]) + 2.0)
    best = np.cumsum(gains)[np.minimum(sizes, hits.shape[1]) - 1]
    ndcg_of_users: FloatArray = (hits * gains).sum(axis=1) / best
    return ndcg_of_users


RBO_P = 0.9


def overlap(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """The share of the longer list's items that are in both lists; 1 for two empty lists."""
    longest = max(len(a), len(b))
    return len(set(a) & set(b)) / longest if longest else 1.0


def rank_biased_overlap(a: Sequence[Hashable], b: Sequence[Hashable], p: float = RBO_P) -> float:
    """RBO_ext in [0, 1], 1 for equal lists (Webber, Moffat & Zobel, TOIS 2010, eq. 32).

    RBO is the mean agreement over all depths. Depth d weighs (1 − p) p^(d−1): with p = 0.9 the
    first ten places weigh 86 %. RBO_ext extrapolates the agreement below the end of the lists. The
    overlap is 1 for two empty lists, and 0 for an empty and another list. Items of a list are
    distinct. Raises ValueError unless 0 < ``p`` < 1.
    """
    if not 0 < p < 1:
        raise ValueError(f"p = {p} is not between 0 and 1")
    short, long = sorted((a, b), key=len)
    if not short:
        return 1.0 if not long else 0.0
    seen_short: set[Hashable] = set()
    seen_long: set[Hashable] = set()
    common, at_short, total = 0, 0, 0.0
    s, n = len(short), len(long)
    for d, item in enumerate(long, 1):
        if d <= s:
            other = short[d - 1]
            common += 1 if item == other else (item in seen_short) + (other in seen_long)
            seen_short.add(other)
        else:
            common += item in seen_short
        seen_long.add(item)
        total += common / d * p**d
        if d == s:
            at_short = common
        elif d > s:
            total += at_short * (d - s) / (s * d) * p**d
    rest = (common - at_short) / n + at_short / s
    return (1 - p) / p * total + rest * p**n
