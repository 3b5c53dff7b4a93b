"""What is known of a user: what a vector is fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ncr_core.errors import DataError

IntArray = npt.NDArray[np.int64]
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


def of_first(evidence: Evidence, n: int) -> Evidence:
    """The evidence with those alone of the liked items that are among the first ``n`` rows."""
    kept = evidence.items < n
    if kept.all():
        return evidence
    weights = None if evidence.weights is None else evidence.weights[kept]
    return replace(evidence, items=evidence.items[kept], weights=weights)
