"""Candidates: for each user the best M items by a cheap score, in a fixed seeded order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ncr_core.ranking.exact import PAD, ExactRanker

ANCHORS = 16
ITEMS_AT_ONCE = 2**13  # of the catalogue: memory does not grow with it


def spread_over_popularity(counts: Tensor, n: int) -> Tensor:
    """``n`` item rows at equal steps of the popularity ranking: (n_items,) counts → (≤ n,)."""
    ranked = torch.sort(counts, descending=True, stable=True).indices
    n = min(n, len(ranked))
    steps = torch.linspace(0, len(ranked) - 1, n + 2)[1:-1] if n > 1 else torch.zeros(1)
    picked: Tensor = ranked[steps.round().long()]
    return picked


class CandidateGenerator:
    """Scores every item by how it fares against a few anchor items, and keeps the best M.

    The score of an item is its mean margin over the anchors. For an additive model that orders
    items exactly as the model does.
    """

    def __init__(self, ranker: ExactRanker, anchors: Sequence[int], seed: int) -> None:
        self.ranker = ranker
        self.anchors = torch.tensor(list(anchors), dtype=torch.long, device=ranker.device)
        order = torch.randperm(ranker.n_items, generator=torch.Generator().manual_seed(seed))
        self.order = torch.empty_like(order)
        self.order[order] = torch.arange(len(order))
        self.order = self.order.to(ranker.device)

    @torch.inference_mode()
    def scores(self, users: Tensor) -> Tensor:
        """(B, E) user vectors → (B, n_items) mean margins against the anchors."""
        n, a = self.ranker.n_items, len(self.anchors)
        out = torch.empty((len(users), n), dtype=torch.float64, device=self.ranker.device)
        for start in range(0, n, ITEMS_AT_ONCE):
            block = torch.arange(start, min(start + ITEMS_AT_ONCE, n), device=self.ranker.device)
            i = block.repeat_interleave(a).expand(len(users), -1)
            j = self.anchors.repeat(len(block)).expand(len(users), -1)
            margins = self.ranker.compare(users, i, j)
            out[:, block] = margins.view(len(users), len(block), a).mean(dim=2)
        return out

    def pick(self, scores: Tensor, allowed: Tensor, m: int) -> Tensor:
        """The best ``m`` allowed items a user in the fixed order, padded with −1.

        ``scores`` and ``allowed`` are (B, n_items).
        """
        m = min(m, scores.shape[1])
        top = torch.topk(scores.masked_fill(~allowed, -torch.inf), m, dim=1)
        place = self.order[top.indices].masked_fill(top.values == -torch.inf, scores.shape[1])
        place, by_place = place.sort(dim=1, stable=True)
        return torch.where(place == scores.shape[1], PAD, top.indices.gather(1, by_place))
