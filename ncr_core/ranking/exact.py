"""The exact ranker: Algorithm 1's answer for many users at once, over any PairwiseRanker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ncr_core.models.ranker import PairwiseRanker
from ncr_core.ranking.bound import BoundRanker
from ncr_core.ranking.compiled import CompiledScan, compiled_scan
from ncr_core.ranking.cuda import FusedScan, fused_scan
from ncr_core.ranking.margins import PAD, Margins
from ncr_core.ranking.row_scan import RowScan
from ncr_core.ranking.sorted import top_of_all
from ncr_core.ranking.tournament import Strategy

ITEMS_AT_ONCE = 2**13  # of the catalogue: memory does not grow with it

__all__ = ["PAD", "ExactRanker"]


class ExactRanker:
    """Ranks candidates by pairwise comparison, equal to the literal Algorithm 1 on its margins.

    Additive models are sorted by s_ui, which is what Algorithm 1 gives for them; for the others the
    resumable scan asks for the margins it needs: in compiled code, on a CPU where numba is there
    and on a GPU where Triton is, or in torch (``compiled=False``), user by user on a CPU and for
    all of the batch at once elsewhere. Built once a model; ``rank`` does not change it and may be
    called from several threads.
    ``on_pairs`` is told how many pairs of items each call of ``rank`` compared; none, where it
    sorted.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        *,
        compiled: bool = True,
        on_pairs: Callable[[int], None] | None = None,
    ) -> None:
        self.margins = Margins(model.tables())
        self.may_compile = compiled
        self.on_pairs = on_pairs
        self.n_items = model.n_items
        self.device = model.device

    @cached_property
    def compiled(self) -> CompiledScan | None:
        """The compiled scan, made when it is first asked for."""
        return compiled_scan(self.margins) if self.may_compile else None

    @cached_property
    def fused(self) -> FusedScan | None:
        """The scan on a GPU, made when it is first asked for."""
        return fused_scan(self.margins) if self.may_compile else None

    @cached_property
    def rows(self) -> RowScan | None:
        """The scan by rows in torch, made when it is first asked for."""
        return RowScan(self.margins) if RowScan.takes(self.margins) else None

    def bind(self, users: Tensor) -> BoundRanker:
        """For several questions about the same (B, E) user vectors."""
        return BoundRanker(self, users)

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
        return self.bind(users).rank(candidates, k, strategy)

    def top(
        self, users: Tensor, k: int, allowed: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Top ``k`` of the whole catalogue for an additive model: (B, E) users → (B, k) item rows.

        ``allowed`` (B, n_items) are those that may be among them; what is missing is −1. Of items
        that tie, the one with the lower ``order`` (n_items,) comes first, or the lower row.

        Raises ValueError for a model that is more than a product of vectors.
        """
        if not self.margins.sortable:
            raise ValueError("this model is no product of vectors: rank candidates")
        return top_of_all(self.margins, users.to(self.device), k, allowed, order, self.may_compile)

    def all_margins(self, users: Tensor, candidates: Tensor) -> Tensor:
        """(B, M, M) margins of each candidate over each; 0 where there is none. As for ``rank``."""
        return self.bind(users).all_margins(candidates)

    def compare(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Margins z_uij − z_uji of (B, E) users and (B, L) items i and j → (B, L) float64."""
        return self.bind(users).compare(i, j)

    def linear_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """s_ui in float64 of (B, E) user vectors and (B, M) items → (B, M)."""
        return self.bind(users).linear_scores(items)

    @torch.inference_mode()
    def mean_margins(self, users: Tensor, anchors: Tensor) -> Tensor:
        """How far each item is preferred to the (A,) anchors on average: (B, E) → (B, n_items)."""
        bound, anchors = self.bind(users), anchors.to(self.device)
        out = torch.zeros((len(users), self.n_items), dtype=torch.float64, device=self.device)
        if not len(anchors):
            return out
        for start in range(0, self.n_items, ITEMS_AT_ONCE):
            stop = min(start + ITEMS_AT_ONCE, self.n_items)
            block = torch.arange(start, stop, device=self.device)
            out[:, start:stop] = bound.mean_margins(anchors, block)
        return out
