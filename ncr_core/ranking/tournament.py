"""Orders and certificates from all margins between a user's candidates.

Algorithm 1 looks at few of them, and its answer may depend on the order of the candidates. With all
of them there are orders that do not: by the number of wins (Copeland), and by the mean probability
to be preferred (Borda).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Strategy = Literal["algorithm1", "copeland", "borda"]
STRATEGIES: tuple[Strategy, ...] = ("algorithm1", "copeland", "borda")


def wins(margins: Tensor, lengths: Tensor) -> Tensor:
    """(B, M, M) margins, (B,) numbers of candidates → (B, M) numbers of wins, −1 beyond them."""
    inside = _inside(margins, lengths)
    won = ((margins > 0) & inside.unsqueeze(1)).sum(dim=2)
    return won.masked_fill(~inside, -1)


def preference(margins: Tensor, lengths: Tensor) -> Tensor:
    """The mean of σ(margin / 2) over the other candidates: (B, M), −1 beyond the lengths."""
    inside = _inside(margins, lengths)
    probability = torch.sigmoid(margins.double() / 2)
    others = inside.unsqueeze(1) & ~torch.eye(
        margins.shape[1], dtype=torch.bool, device=margins.device
    )
    mean = (probability * others).sum(dim=2) / (lengths - 1).clamp(min=1).unsqueeze(1)
    return mean.masked_fill(~inside, -1.0)


def order_by(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """(B, M) → (B, k) positions of the highest, padded with −1; ties in the candidates' order."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    ranks = torch.arange(order.shape[1], device=scores.device)
    return torch.where(ranks < lengths.unsqueeze(1), order, -1)


def certified(won: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Whether the K largest numbers of wins are m − 1, m − 2, …, m − K: (B, M), (B,) → (B,).

    That order is then Algorithm 1's, whatever the order of the candidates: the first beats all, the
    second all but the first, and so on.
    """
    best = torch.sort(won, dim=1, descending=True).values[:, :k]
    ranks = torch.arange(best.shape[1], device=won.device)
    expected = lengths.unsqueeze(1) - 1 - ranks
    return ((best == expected) | (ranks >= lengths.unsqueeze(1))).all(dim=1)


def cyclic_share(won: Tensor, lengths: Tensor) -> Tensor:
    """The share of triples of candidates that are cycles, i beats j beats l beats i: (B,) float64.

    A triple that is no cycle has a candidate that beats both others, so cycles are
    C(m, 3) − Σ C(w, 2) (Kendall and Babington Smith 1940). Only where nothing ties.
    """
    m = lengths.double()
    triples = m * (m - 1) * (m - 2) / 6
    w = won.clamp(min=0).double()
    cycles = triples - (w * (w - 1) / 2).sum(dim=1)
    return torch.where(triples > 0, cycles / triples.clamp(min=1), 0.0)


def _inside(margins: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(margins.shape[1], device=margins.device) < lengths.unsqueeze(1)
