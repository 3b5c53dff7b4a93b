"""The places of a ranked list, and the probabilities that margins stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ncr_core.ranking import PAD


class Reason(NamedTuple):
    """One of the user's own items, and what it does for a place."""

    row: int
    effect: float
    """By how much the log-odds of the place against the others shown would be lower without it."""


class RankedItem(NamedTuple):
    """One place of a ranked list."""

    row: int
    score: float
    preferred_over_next: float | None
    because: Sequence[Reason] = ()
    """The own items that it is due to most, where that was asked for."""


def probability(margins: Tensor, temperature: float) -> NDArray[np.float64]:
    """P(i preferred to j) = σ((z_ij − z_ji) / 2T) of margins z_ij − z_ji."""
    found: NDArray[np.float64] = 0.5 + 0.5 * np.tanh(margins.cpu().numpy() / (4.0 * temperature))
    return found


def left_filled(ranked: Tensor) -> Tensor:
    """(B, k) item rows with −1 anywhere → the same with all −1 at the end."""
    order = (ranked == PAD).to(torch.int8).argsort(dim=1, stable=True)
    return ranked.gather(1, order)


def places(
    rows: Sequence[int], scores: Sequence[float], ahead: Sequence[float]
) -> list[RankedItem]:
    """A list of rows that may end in −1, with their scores, and the probabilities that each is
    preferred to the next."""
    rows = [row for row in rows if row != PAD]
    last = len(rows) - 1
    return [
        RankedItem(row, scores[at], ahead[at] if at < last else None) for at, row in enumerate(rows)
    ]
