"""The similarity of items to a model, and lists with more variety by that similarity.

The similarity of two items is the cosine of their vectors in the ranking tables. Variety is maximal
marginal relevance (Carbonell & Goldstein, The use of MMR, diversity-based reranking, SIGIR'98). The
item's place in the ranked list is its relevance, because an order by pairwise comparison has no
scores.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.models.scoring_tables import PairTables

MAX_DIMENSIONS = 64
ITEMS_AT_ONCE = 2**16  # items, so that double precision takes little memory

Floats = NDArray[np.float32]


class ItemSpace:
    """Unit vectors (n_items, D), whose products are the similarities of items, in [−1, 1].

    The vectors come from the ranking tables, side by side: an item's vector in s_ui, with the
    weights of the prediction layer in it, and its two projections into the tower's first layer. The
    mean of the trained items is subtracted. Biases are left out, because biases are popularity. Of
    more than 64 dimensions, the 64 in which the trained items vary most stay. Items that were added
    therefore do not change the similarity of others. ``trained_items`` are the first rows, by
    default all.
    """

    def __init__(self, tables: PairTables, n_items: int, trained_items: int | None = None) -> None:
        parts = _parts(tables)
        trained = [part[:trained_items] for part in parts]
        self._mean = [part.double().mean(dim=0) for part in trained]
        # A model without parts knows nothing but how popular items are.
        self._basis = _basis(trained, self._mean) if parts else torch.zeros(0, 0)
        self.vectors: Floats = self._projected(parts, 0, n_items)

    def with_others(self, first: int, tables: PairTables, n_items: int) -> ItemSpace:
        """The space of other tables, of which the items before row ``first`` are the same.

        Mean and directions stay, and only the other items are projected.
        """
        space = copy.copy(self)
        later = self._projected(_parts(tables), first, n_items)
        space.vectors = np.concatenate([self.vectors[:first], later])
        return space

    def _projected(self, parts: list[Tensor], first: int, n_items: int) -> Floats:
        """The unit vectors of the items from row ``first`` on."""
        vectors = np.zeros((n_items - first, self._basis.shape[1]), dtype=np.float32)
        if not parts:
            return vectors
        for start in range(first, n_items, ITEMS_AT_ONCE):
            projected = _block(parts, self._mean, start) @ self._basis
            norms = projected.norm(dim=1, keepdim=True)
            unit = torch.where(norms > 0, projected / norms, 0.0)
            vectors[start - first :][:ITEMS_AT_ONCE] = unit.float().cpu().numpy()
        return vectors

    def nearest(self, item: int, allowed: NDArray[np.bool_], n: int) -> list[tuple[int, float]]:
        """The ``n`` items most similar to an item, with their similarities, highest first.

        ``allowed`` is (n_items,). The item itself is never among the ``n``. Of equally similar
        items the lower row comes first.
        """
        similarity = self.vectors @ self.vectors[item]
        similarity[~allowed] = -np.inf
        similarity[item] = -np.inf
        n = min(n, int(np.isfinite(similarity).sum()))
        if n <= 0:
            return []
        lowest = np.partition(similarity, -n)[-n]
        rows = np.flatnonzero(similarity >= lowest)
        rows = rows[np.argsort(-similarity[rows], kind="stable")][:n]
        return [(int(row), min(1.0, float(similarity[row]))) for row in rows]


def _parts(tables: PairTables) -> list[Tensor]:
    """The item tables of ranking: (n_items, …) each."""
    parts = [] if tables.linear is None else [tables.linear.items]
    if tables.tower is not None:
        parts += [tables.tower.first, tables.tower.second]
    parts += [scale * point.items for scale, point in tables.points if point.bias is None]
    return [part for part in parts if part.shape[1]]


def _block(parts: list[Tensor], mean: list[Tensor], start: int) -> Tensor:
    stop = start + ITEMS_AT_ONCE
    centred = [part[start:stop].double() - m for part, m in zip(parts, mean, strict=True)]
    return torch.cat(centred, dim=1)


def _basis(parts: list[Tensor], mean: list[Tensor]) -> Tensor:
    """(dimensions, ≤ 64) orthogonal directions with the most variance."""
    size = sum(part.shape[1] for part in parts)
    covariance = torch.zeros((size, size), dtype=torch.float64, device=parts[0].device)
    for start in range(0, len(parts[0]), ITEMS_AT_ONCE):
        block = _block(parts, mean, start)
        covariance += block.T @ block
    values, directions = torch.linalg.eigh(covariance)
    # Directions in which items do not differ but for rounding say nothing.
    varies = values > 1e-12 * values[-1].clamp(min=1e-300)
    basis: Tensor = directions[:, varies][:, -MAX_DIMENSIONS:]
    return basis


def diversified(vectors: NDArray[np.float32], n: int, diversity: float) -> NDArray[np.int64]:
    """The ``n`` places of a ranked list to show, in their new order.

    ``vectors`` (P, D) stand for the items of the list, best first. Their products are similarities,
    1 for an item and itself. The next item is the one with the largest

        (1 − diversity)·(1 − r/P) − diversity·max(0, its highest similarity to chosen items)

    where r is its place from 0. Of equal items the first is next. The first place therefore always
    stays, and with a diversity of 0 all places stay. Returns (min(n, P),) places from 0.
    """
    p = len(vectors)
    n = min(n, p)
    if diversity <= 0.0 or n <= 1:
        return np.arange(n, dtype=np.int64)
    relevance = (1.0 - diversity) * (1.0 - np.arange(p) / p)
    nearest = np.zeros(p)
    is_left = np.ones(p, dtype=np.bool_)
    chosen = np.zeros(n, dtype=np.int64)
    for position in range(n):
        value = np.where(is_left, relevance - diversity * nearest, -np.inf)
        best = int(value.argmax())
        chosen[position], is_left[best] = best, False
        np.maximum(nearest, vectors @ vectors[best], out=nearest)
    return chosen
