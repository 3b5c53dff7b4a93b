"""The exact ranker: Algorithm 1's answer for many users at once, over any PairwiseRanker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.ranking.compiled import CompiledScan, compiled_scan
from ncr_core.ranking.margins import TIE, BoundMargins, Margins
from ncr_core.ranking.scan import resumable_scan
from ncr_core.ranking.tournament import STRATEGIES, Strategy, order_by, preference, wins

PAD = -1
ITEMS_AT_ONCE = 2**13  # of the catalogue: memory does not grow with it
PAIRS_AT_ONCE = 2**17  # bounds the memory of a comparison: some hundred bytes a pair at d = 8


class ExactRanker:
    """Ranks candidates by pairwise comparison, equal to the literal Algorithm 1 on its margins.

    Additive models are sorted by s_ui, which is what Algorithm 1 gives for them; for the others the
    resumable scan asks for the margins it needs: in compiled code on a CPU where numba is there, or
    in torch (``compiled=False``) for all users of the batch at once. Built once a model; ``rank``
    does not change it and may be called from several threads. ``on_pairs`` is told how many pairs
    of items each call of ``rank`` compared; none, where it sorted.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        *,
        compiled: bool = True,
        on_pairs: Callable[[int], None] | None = None,
    ) -> None:
        self.margins = Margins(model.tables())
        self._may_compile = compiled
        self._on_pairs = on_pairs
        self.n_items = model.n_items
        self.device = model.device

    @cached_property
    def compiled(self) -> CompiledScan | None:
        """The compiled scan, made when it is first asked for."""
        return compiled_scan(self.margins) if self._may_compile else None

    @torch.inference_mode()
    def rank(
        self, users: Tensor, candidates: Tensor, k: int, strategy: Strategy = "algorithm1"
    ) -> Tensor:
        """Top ``k`` of each user's candidates.

        ``users`` is (B, E) user vectors; ``candidates`` (B, M) item rows in the order that decides
        ties, each row filled from the left and padded with −1. Returns (B, min(k, M)) item rows,
        best first, padded with −1. ``strategy`` is another order than Algorithm 1's: by wins or by
        mean probability against all other candidates, which takes all their margins.

        Raises ConfigError for a strategy that there is not, IndexError for an item.
        """
        if strategy not in STRATEGIES:
            raise ConfigError(f"unknown strategy {strategy!r}: {', '.join(STRATEGIES)}")
        users, candidates = users.to(self.device), candidates.to(self.device)
        k = min(k, candidates.shape[1])
        lengths = (candidates != PAD).sum(dim=1)
        items = candidates.clamp(min=0)
        bound = self.margins.bind(users)
        if strategy != "algorithm1":
            of_all = self._all_margins(users, bound, items, lengths)
            self._compared(int((lengths * (lengths - 1) // 2).sum()))
            score = wins if strategy == "copeland" else preference
            order = order_by(score(of_all, lengths), lengths, k)
        elif self.margins.additive:
            order = self._sorted_positions(bound, items, lengths, k)
        elif self.compiled is not None and self.compiled.takes(candidates.shape[1]):
            linear = self._linear(bound, items)
            order, work = self.compiled.positions(users, items, lengths, linear, k)
            self._compared(int(work.pairs.sum()))
        else:

            def margins(rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
                self._compared(i.numel())
                return bound(rows, _items_at(items, rows, i), _items_at(items, rows, j))

            order = resumable_scan(margins, lengths, k)
        ranked = items.gather(1, order.clamp(min=0))
        return torch.where(order == PAD, PAD, ranked)

    def _compared(self, pairs: int) -> None:
        if self._on_pairs is not None:
            self._on_pairs(pairs)

    @torch.inference_mode()
    def all_margins(self, users: Tensor, candidates: Tensor) -> Tensor:
        """(B, M, M) margins of each candidate over each; 0 where there is none. As for ``rank``."""
        users, candidates = users.to(self.device), candidates.to(self.device)
        lengths, items = (candidates != PAD).sum(dim=1), candidates.clamp(min=0)
        return self._all_margins(users, self.margins.bind(users), items, lengths)

    def _all_margins(
        self, users: Tensor, bound: BoundMargins, items: Tensor, lengths: Tensor
    ) -> Tensor:
        if self.compiled is not None:
            return self.compiled.all_margins(users, items, lengths, self._linear(bound, items))
        n, m = items.shape
        rows = torch.arange(n, device=self.device)
        out = torch.zeros((n, m, m), dtype=torch.float64, device=self.device)
        width = max(1, PAIRS_AT_ONCE // max(1, n * m))
        for start in range(0, m, width):
            i = items[:, start : start + width]
            some = i.repeat_interleave(m, dim=1), items.repeat(1, i.shape[1])
            out[:, start : start + width] = bound(rows, *some).view(n, -1, m)
        inside = torch.arange(m, device=self.device) < lengths.unsqueeze(1)
        return out * (inside.unsqueeze(1) & inside.unsqueeze(2))

    @torch.inference_mode()
    def compare(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Margins z_uij − z_uji of (B, E) users and (B, L) items i and j → (B, L) float64."""
        rows = torch.arange(len(users), device=self.device)
        bound = self.margins.bind(users.to(self.device))
        i, j = i.to(self.device), j.to(self.device)
        width = max(1, PAIRS_AT_ONCE // max(1, len(users)))
        parts = [
            bound(rows, i[:, at : at + width], j[:, at : at + width])
            for at in range(0, i.shape[1], width)
        ]
        empty = torch.zeros(i.shape, dtype=torch.float64, device=self.device)
        return torch.cat(parts, dim=1) if parts else empty

    @torch.inference_mode()
    def linear_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """s_ui in float64 of (B, E) user vectors and (B, M) items → (B, M)."""
        return self._linear(self.margins.bind(users.to(self.device)), items.to(self.device))

    @torch.inference_mode()
    def mean_margins(self, users: Tensor, anchors: Tensor) -> Tensor:
        """How far each item is preferred to the (A,) anchors on average: (B, E) → (B, n_items)."""
        users, anchors = users.to(self.device), anchors.to(self.device)
        out = torch.zeros((len(users), self.n_items), dtype=torch.float64, device=self.device)
        if not len(anchors):
            return out
        for start in range(0, self.n_items, ITEMS_AT_ONCE):
            stop = min(start + ITEMS_AT_ONCE, self.n_items)
            block = torch.arange(start, stop, device=self.device)
            out[:, start:stop] = self._mean_margins(users, anchors, block)
        return out

    def _mean_margins(self, users: Tensor, anchors: Tensor, block: Tensor) -> Tensor:
        if self.margins.additive or self.compiled is not None:
            items = torch.cat([anchors, block])
            linear = self._linear(self.margins.bind(users), items.expand(len(users), -1))
            if self.compiled is not None:
                return self.compiled.mean_margins(users, items, len(anchors), linear)
            of_anchors, of_items = linear[:, : len(anchors)], linear[:, len(anchors) :]
            return of_items - of_anchors.mean(dim=1, keepdim=True)
        i = block.repeat_interleave(len(anchors)).expand(len(users), -1)
        j = anchors.repeat(len(block)).expand(len(users), -1)
        margins = self.compare(users, i, j)
        return margins.view(len(users), len(block), len(anchors)).mean(dim=2)

    def _sorted_positions(
        self, bound: BoundMargins, items: Tensor, lengths: Tensor, k: int
    ) -> Tensor:
        inside = torch.arange(items.shape[1], device=self.device) < lengths.unsqueeze(1)
        # Rounding to TIE keeps what differs only by rounding a tie.
        scores = (self._linear(bound, items) / TIE).round()
        scores = scores.masked_fill(~inside, -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
        ranks = torch.arange(k, device=self.device)
        return torch.where(ranks < lengths.unsqueeze(1), order, PAD)

    def _linear(self, bound: BoundMargins, items: Tensor) -> Tensor:
        """(B, M) s_ui in float64, element by element: not dependent on the rest of the batch."""
        rows = torch.arange(len(items), device=self.device)
        width = max(1, PAIRS_AT_ONCE // max(1, len(items)))
        parts = [
            bound.linear_scores(rows, items[:, at : at + width], double=True)
            for at in range(0, max(1, items.shape[1]), width)
        ]
        return torch.cat(parts, dim=1)


def _items_at(items: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    return items[rows.unsqueeze(1), positions]
