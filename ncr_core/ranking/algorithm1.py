"""Algorithm 1 as the paper writes it, and orders from all margins: Copeland's and Borda's.

Algorithm 1 is the literal reference that every faster ranker must equal. Algorithm 1 compares few
pairs, and its list may depend on the order of the candidates. Two orders from all margins do not
depend on that order: the number of wins (Copeland), and the mean probability of being preferred
(Borda).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def algorithm1(
    candidates: Sequence[Item], beats: Callable[[Item, Item], bool], k: int
) -> list[Item]:
    """The top ``k`` of ``candidates`` by K passes, each choosing a most preferred item (§4.4).

    ``beats(j, champion)`` says whether ŷ_u,j,max > ŷ_u,max,j: strictly, so ties keep the champion.
    The outcome may depend on the order of the candidates where the preference is intransitive.
    """
    remaining = list(candidates)
    ranked: list[Item] = []
    for _ in range(min(k, len(remaining))):
        best = 0
        for challenger in range(1, len(remaining)):
            if beats(remaining[challenger], remaining[best]):
                best = challenger
        ranked.append(remaining.pop(best))
    return ranked


Strategy = Literal["algorithm1", "copeland", "borda"]
STRATEGIES: tuple[Strategy, ...] = ("algorithm1", "copeland", "borda")


def wins(margins: Tensor, lengths: Tensor) -> Tensor:
    """(B, M, M) margins, (B,) numbers of candidates → (B, M) numbers of wins, −1 in the padding."""
    inside = _inside(margins, lengths)
    won = ((margins > 0) & inside.unsqueeze(1)).sum(dim=2)
    return won.masked_fill(~inside, -1)


def mean_preference(margins: Tensor, lengths: Tensor) -> Tensor:
    """(B, M, M) margins → (B, M) mean of σ(margin / 2) over the others, −1 in the padding."""
    inside = _inside(margins, lengths)
    probability = torch.sigmoid(margins.double() / 2)
    others = inside.unsqueeze(1) & ~torch.eye(
        margins.shape[1], dtype=torch.bool, device=margins.device
    )
    mean = (probability * others).sum(dim=2) / (lengths - 1).clamp(min=1).unsqueeze(1)
    return mean.masked_fill(~inside, -1.0)


def top_positions(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """(B, M) scores → (B, k) positions of the highest, padded with −1; ties in the given order."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    ranks = torch.arange(order.shape[1], device=scores.device)
    return torch.where(ranks < lengths.unsqueeze(1), order, -1)


def _inside(margins: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(margins.shape[1], device=margins.device) < lengths.unsqueeze(1)
