"""How alike items are to a model: the cosine of what ranking knows of them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.models.tables import PairTables

MOST_DIMENSIONS = 64
AT_ONCE = 2**16  # items, so that double precision takes little memory

Floats = NDArray[np.float32]


class ItemSpace:
    """Unit vectors (n_items, D), whose products are the similarities of items, in [−1, 1].

    They come from the tables that ranking uses, side by side: an item's vector in s_ui with the
    weights of the prediction layer in it, and its two projections into the tower's first layer.
    What all items have in common, the mean, is left out, and so are biases, which are popularity.
    Where there are more than 64 dimensions, those with the most variance stay.
    """

    def __init__(self, tables: PairTables, n_items: int) -> None:
        parts = _parts(tables)
        if not parts:  # a model that knows nothing but how popular they are
            self.vectors: Floats = np.zeros((n_items, 0), dtype=np.float32)
            return
        mean = [part.double().mean(dim=0) for part in parts]
        basis = _basis(parts, mean)
        self.vectors = np.zeros((n_items, basis.shape[1]), dtype=np.float32)
        for start in range(0, n_items, AT_ONCE):
            projected = _block(parts, mean, start) @ basis
            norms = projected.norm(dim=1, keepdim=True)
            unit = torch.where(norms > 0, projected / norms, 0.0)
            self.vectors[start : start + AT_ONCE] = unit.float().cpu().numpy()

    def nearest(self, item: int, allowed: NDArray[np.bool_], n: int) -> list[tuple[int, float]]:
        """The ``n`` of the allowed items that are most like an item, which is not among them, with
        their similarity, highest first; of equal ones the lower row.

        ``allowed`` is (n_items,).
        """
        similarity = self.vectors @ self.vectors[item]
        similarity[~allowed] = -np.inf
        similarity[item] = -np.inf
        n = min(n, int(np.isfinite(similarity).sum()))
        if n <= 0:
            return []
        least = np.partition(similarity, -n)[-n]
        rows = np.flatnonzero(similarity >= least)
        rows = rows[np.argsort(-similarity[rows], kind="stable")][:n]
        return [(int(row), min(1.0, float(similarity[row]))) for row in rows]


def _parts(tables: PairTables) -> list[Tensor]:
    """What ranking knows of items: (n_items, …) each."""
    parts = [] if tables.linear is None else [tables.linear.items]
    if tables.tower is not None:
        parts += [tables.tower.first, tables.tower.second]
    parts += [scale * point.items for scale, point in tables.points if point.bias is None]
    return [part for part in parts if part.shape[1]]


def _block(parts: list[Tensor], mean: list[Tensor], start: int) -> Tensor:
    of_parts = [
        part[start : start + AT_ONCE].double() - own for part, own in zip(parts, mean, strict=True)
    ]
    return torch.cat(of_parts, dim=1)


def _basis(parts: list[Tensor], mean: list[Tensor]) -> Tensor:
    """(dimensions, ≤ 64) orthogonal directions with the most variance."""
    size = sum(part.shape[1] for part in parts)
    covariance = torch.zeros((size, size), dtype=torch.float64, device=parts[0].device)
    for start in range(0, len(parts[0]), AT_ONCE):
        block = _block(parts, mean, start)
        covariance += block.T @ block
    found = torch.linalg.eigh(covariance)
    # Directions in which items do not differ but for rounding say nothing.
    some = found.eigenvalues > 1e-12 * found.eigenvalues[-1].clamp(min=1e-300)
    basis: Tensor = found.eigenvectors[:, some][:, -MOST_DIMENSIONS:]
    return basis
