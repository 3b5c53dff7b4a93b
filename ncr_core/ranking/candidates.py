"""Candidates: for each user the best M items by a cheap score, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ncr_core.ranking.exact import PAD, ExactRanker
from ncr_core.ranking.shortlist import Shortlist

REFERENCES = 16  # that scores are told against
ANCHORS = 4  # of them that candidates are chosen by: `python -m benchmarks.candidates`
BEST_LAST = 32
SHORTLISTED = 5  # times the candidates


def spread_over_popularity(counts: Tensor, n: int) -> Tensor:
    """``n`` item rows at equal steps of the popularity ranking: (n_items,) counts → (≤ n,)."""
    ranked = torch.sort(counts, descending=True, stable=True).indices
    n = min(n, len(ranked))
    steps = torch.linspace(0, len(ranked) - 1, n + 2)[1:-1] if n > 1 else torch.zeros(1)
    picked: Tensor = ranked[steps.round().long()]
    return picked


def anchors_of(references: Sequence[int]) -> list[int]:
    """A few of the reference items, which stand by popularity, at equal steps."""
    n = min(ANCHORS, len(references))
    return [references[(2 * step + 1) * len(references) // (2 * n)] for step in range(n)]


class CandidateGenerator:
    """Scores every item by how it fares against a few anchor items, and keeps the best M.

    The score of an item is its mean margin over the anchors. For an additive model that orders
    items exactly as the model does. ``shortlist`` finds the best by s_ui alone in a very large
    catalogue; of a multiple of m of them, the scores then choose.
    """

    def __init__(
        self,
        ranker: ExactRanker,
        anchors: Sequence[int],
        seed: int,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.ranker = ranker
        self.shortlist = shortlist
        self.anchors = torch.tensor(list(anchors), dtype=torch.long, device=ranker.device)
        order = torch.randperm(ranker.n_items, generator=torch.Generator().manual_seed(seed))
        self.order = torch.empty_like(order)
        self.order[order] = torch.arange(len(order))
        self.order = self.order.to(ranker.device)

    def scores(self, users: Tensor) -> Tensor:
        """(B, E) user vectors → (B, n_items) mean margins against the anchors."""
        return self.ranker.mean_margins(users, self.anchors)

    @torch.inference_mode()
    def best(self, scores: Tensor, allowed: Tensor, m: int) -> Tensor:
        """The best ``m`` allowed items a user, best first, padded with −1: (B, ≤ m).

        ``scores`` and ``allowed`` are (B, n_items). Equal scores stand in a seeded order.
        """
        m = min(m, scores.shape[1])
        scores = scores.nan_to_num(nan=-torch.inf)
        top = torch.topk(scores.masked_fill(~allowed, -torch.inf), m, dim=1)
        by_place = self.order[top.indices].argsort(dim=1)
        items, values = top.indices.gather(1, by_place), top.values.gather(1, by_place)
        by_score = values.argsort(dim=1, descending=True, stable=True)
        items, values = items.gather(1, by_score), values.gather(1, by_score)
        return torch.where(values > -torch.inf, items, PAD)

    def search(self, users: Tensor, allowed: Tensor, m: int) -> Tensor:
        """The best ``m`` of (B, n_items) allowed items for (B, E) user vectors: (B, ≤ m), padded.

        With a shortlist only its items are scored: for catalogues that are too large for more.
        """
        users, sortable = users.to(self.ranker.device), self.ranker.margins.sortable
        if self.shortlist is None:
            if sortable:
                return self.ranker.top(users, m, allowed, self.order)
            return self.best(self.scores(users), allowed, m)
        if sortable:
            return self.shortlist.search(users, allowed, m)
        few = self.shortlist.search(users, allowed, SHORTLISTED * m)
        scores = torch.full(few.shape, -torch.inf, dtype=torch.float64, device=few.device)
        for row, user, items in zip(scores, torch.split(users, 1), few, strict=True):
            own = items[items != PAD]
            row[: len(own)] = self.ranker.bind(user).mean_margins(self.anchors, own)[0]
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :m]
        return few.gather(1, order)

    def pick(self, scores: Tensor, allowed: Tensor, m: int) -> Tensor:
        """The candidates: ``best`` as ``cheap_to_rank``."""
        return cheap_to_rank(self.best(scores, allowed, m))


def cheap_to_rank(best: Tensor) -> Tensor:
    """(B, M) items, best first, padded with −1 → the same in an order that is cheap to rank.

    First come all but the best 32, from good to bad, and then those from bad to good: the first
    champion meets hardly anyone who beats it, and at the end nearly everyone beats the one before,
    which leaves later passes little to do.
    """
    m = best.shape[1]
    length = (best != PAD).sum(dim=1, keepdim=True)
    place = torch.arange(m, device=best.device).expand(len(best), -1)
    rest = (length - BEST_LAST).clamp(min=0)
    source = torch.where(place < rest, place + BEST_LAST, length - 1 - place)
    return torch.where(place < length, best.gather(1, source.clamp(0, max(0, m - 1))), PAD)
