"""The exact ranker bound to the users of a batch: what is computed of them is computed once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.ranking.compiled import BoundUsers, CompiledScan, Rows
from ncr_core.ranking.margins import PAD, TIE, BoundMargins
from ncr_core.ranking.scan import resumable_scan
from ncr_core.ranking.tournament import STRATEGIES, Strategy, order_by, preference, wins

if TYPE_CHECKING:
    from ncr_core.ranking.exact import ExactRanker

PAIRS_AT_ONCE = 2**17  # bounds the memory of a comparison: some hundred bytes a pair at d = 8


class BoundRanker:
    """Answers of an ``ExactRanker`` for (B, E) user vectors. Item rows are padded with −1."""

    def __init__(self, ranker: ExactRanker, users: Tensor) -> None:
        self._ranker = ranker
        self._device = ranker.device
        self._users = _moved(users, ranker.device)

    @cached_property
    def _margins(self) -> BoundMargins:
        return self._ranker.margins.bind(self._users)

    @cached_property
    def _in_code(self) -> tuple[CompiledScan, BoundUsers] | None:
        compiled = self._ranker.compiled
        if compiled is None:
            return None
        users = self._users.detach() if self._users.requires_grad else self._users
        return compiled, compiled.bind(users.numpy())

    def rank(self, candidates: Tensor, k: int, strategy: Strategy = "algorithm1") -> Tensor:
        """See ``ExactRanker.rank``."""
        if strategy not in STRATEGIES:
            raise ConfigError(f"unknown strategy {strategy!r}: {', '.join(STRATEGIES)}")
        k = min(k, candidates.shape[1])
        if strategy == "algorithm1" and self._in_code is not None:
            compiled, users = self._in_code
            if compiled.takes(candidates.shape[1]):
                ranked, work = compiled.rank(users, _rows(candidates), k)
                self._compared(int(work.pairs.sum()))
                return torch.from_numpy(ranked)
        candidates = _moved(candidates, self._device)
        fused = self._ranker.fused
        if strategy == "algorithm1" and fused is not None and fused.takes(*candidates.shape):
            with torch.inference_mode():
                linear = self.linear_scores(candidates.clamp(min=0))
                best, pairs = fused.rank(self._users, candidates, linear, k)
                if self._ranker.on_pairs is not None:
                    self._compared(int(pairs.sum()))
                return best
        return self._in_torch(candidates, k, strategy)

    @torch.inference_mode()
    def _in_torch(self, candidates: Tensor, k: int, strategy: Strategy) -> Tensor:
        lengths = (candidates != PAD).sum(dim=1)
        items = candidates.clamp(min=0)
        if strategy != "algorithm1":
            of_all = self.all_margins(candidates)
            self._compared(int((lengths * (lengths - 1) // 2).sum()))
            score = wins if strategy == "copeland" else preference
            order = order_by(score(of_all, lengths), lengths, k)
        elif self._ranker.margins.additive:
            order = self._sorted_positions(items, lengths, k)
        elif (by_rows := self._ranker.rows) is not None:
            order, pairs = by_rows.rank(self._margins, self._users, items, lengths, k)
            self._compared(pairs)
        else:

            def margins(rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
                self._compared(i.numel())
                return self._margins(rows, _items_at(items, rows, i), _items_at(items, rows, j))

            order = resumable_scan(margins, lengths, k)
        ranked = items.gather(1, order.clamp(min=0))
        return torch.where(order == PAD, PAD, ranked)

    @torch.inference_mode()
    def all_margins(self, candidates: Tensor) -> Tensor:
        """(B, M) item rows → (B, M, M) margins of each over each; 0 where there is none."""
        if self._in_code is not None:
            compiled, users = self._in_code
            return torch.from_numpy(compiled.all_margins(users, _rows(candidates)))
        candidates = candidates.to(self._device)
        lengths, items = (candidates != PAD).sum(dim=1), candidates.clamp(min=0)
        n, m = items.shape
        rows = torch.arange(n, device=self._device)
        out = torch.zeros((n, m, m), dtype=torch.float64, device=self._device)
        width = max(1, PAIRS_AT_ONCE // max(1, n * m))
        for start in range(0, m, width):
            i = items[:, start : start + width]
            some = i.repeat_interleave(m, dim=1), items.repeat(1, i.shape[1])
            out[:, start : start + width] = self._margins(rows, *some).view(n, -1, m)
        inside = torch.arange(m, device=self._device) < lengths.unsqueeze(1)
        return out * (inside.unsqueeze(1) & inside.unsqueeze(2))

    def against(self, ranked: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """How a list fares: (B, k) item rows and (R,) others → (B, k, R) margins of each item over
        each of the others, and (B, k) over the item after it; anything where there is none."""
        if self._in_code is not None:
            compiled, users = self._in_code
            found = compiled.against(users, _rows(ranked), _rows(others))
            return torch.from_numpy(found[0]), torch.from_numpy(found[1])
        with torch.inference_mode():
            b, k = ranked.shape
            items = ranked.clamp(min=0)
            i, j = items.repeat_interleave(len(others), dim=1), others.repeat(k).expand(b, -1)
            over_others = self.compare(i, j).view(b, k, len(others))
            return over_others, self.compare(items, items.roll(-1, dims=1))

    @torch.inference_mode()
    def compare(self, i: Tensor, j: Tensor) -> Tensor:
        """Margins of (B, L) items i over items j → (B, L) float64."""
        rows = torch.arange(len(self._users), device=self._device)
        i, j = i.to(self._device), j.to(self._device)
        width = max(1, PAIRS_AT_ONCE // max(1, len(self._users)))
        parts = [
            self._margins(rows, i[:, at : at + width], j[:, at : at + width])
            for at in range(0, i.shape[1], width)
        ]
        empty = torch.zeros(i.shape, dtype=torch.float64, device=self._device)
        return torch.cat(parts, dim=1) if parts else empty

    @torch.inference_mode()
    def linear_scores(self, items: Tensor) -> Tensor:
        """(B, M) s_ui in float64, element by element: not dependent on the rest of the batch."""
        items = items.to(self._device)
        rows = torch.arange(len(items), device=self._device)
        width = max(1, PAIRS_AT_ONCE // max(1, len(items)))
        parts = [
            self._margins.linear_scores(rows, items[:, at : at + width], double=True)
            for at in range(0, max(1, items.shape[1]), width)
        ]
        return torch.cat(parts, dim=1)

    def mean_margins(self, anchors: Tensor, block: Tensor) -> Tensor:
        """How far each of (T,) items is preferred to (A,) anchors on average → (B, T) float64."""
        if self._in_code is not None:
            compiled, users = self._in_code
            return torch.from_numpy(compiled.mean_margins(users, _rows(anchors), _rows(block)))
        if self._ranker.margins.additive:
            linear = self.linear_scores(torch.cat([anchors, block]).expand(len(self._users), -1))
            of_anchors, of_items = linear[:, : len(anchors)], linear[:, len(anchors) :]
            return of_items - of_anchors.mean(dim=1, keepdim=True)
        i = block.repeat_interleave(len(anchors)).expand(len(self._users), -1)
        j = anchors.repeat(len(block)).expand(len(self._users), -1)
        margins = self.compare(i, j)
        return margins.view(len(self._users), len(block), len(anchors)).mean(dim=2)

    def _sorted_positions(self, items: Tensor, lengths: Tensor, k: int) -> Tensor:
        inside = torch.arange(items.shape[1], device=self._device) < lengths.unsqueeze(1)
        # Rounding to TIE keeps what differs only by rounding a tie.
        scores = (self.linear_scores(items) / TIE).round()
        scores = scores.masked_fill(~inside, -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
        ranks = torch.arange(k, device=self._device)
        return torch.where(ranks < lengths.unsqueeze(1), order, PAD)

    def _compared(self, pairs: int) -> None:
        if self._ranker.on_pairs is not None:
            self._ranker.on_pairs(pairs)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """On the device; to a GPU without waiting for it."""
    if x.device == device:
        return x
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _rows(items: Tensor) -> Rows:
    return np.ascontiguousarray(items.numpy(), dtype=np.int64)


def _items_at(items: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    return items[rows.unsqueeze(1), positions]
