"""The exact ranker: Algorithm 1's lists for many users at once, by the fastest backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.algorithm1 import (
    STRATEGIES,
    Strategy,
    mean_preference,
    top_positions,
    wins,
)
from ncr_core.ranking.backends.additive_topk import AdditiveRanker, top_of_catalogue
from ncr_core.ranking.backends.numba_ranker import (
    NumbaBatch,
    numba_ranker,
    ranking_kernel,
)
from ncr_core.ranking.backends.torch_ranker import TorchRanker
from ncr_core.ranking.backends.triton_ranker import TritonRanker, triton_ranker
from ncr_core.ranking.margins import PAD, BoundMargins, Margins, lazy_property, product_kernel
from ncr_core.ranking.table_blocks import margins_of

ITEMS_AT_ONCE = 2**13  # of the catalogue: memory does not grow with it
MAX_PINNED_BYTES = 2**24  # of a tensor: torch never gives pinned memory back

__all__ = ["PAD", "BoundRanker", "ExactRanker", "Ranker", "compile_kernels"]


class RankerBatch(Protocol):
    """A backend for the users of one batch."""

    def rank(self, candidates: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        """Top ``k`` of (B, M) item rows in the order that decides ties, padded with −1.

        Returns:
            (B, k) item rows, best first, padded with −1, as the literal Algorithm 1 gives them, and
            (B,) the numbers of compared pairs of each user; None for a backend that compares no
            pairs.
        """
        ...


class UserMargins(Protocol):
    """Margins of the B users of one batch, in torch (`BoundMargins`) or compiled."""

    def all_margins(self, candidates: Tensor) -> Tensor:
        """(B, M) item rows → (B, M, M) margins of each over each; 0 in the padding."""
        ...

    def list_margins(self, ranked: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """The margins of the items of (B, k) lists over (R,) other items, and over the next item.

        Returns:
            (B, k, R) margins of each listed item over each other item, and (B, k) margins over the
            next item of the list; undefined in the padding, and without a next item.
        """
        ...

    def mean_margins(self, anchors: Tensor, block: Tensor) -> Tensor:
        """The mean margins of (T,) items over (A,) anchors → (B, T) float64."""
        ...


class Ranker(Protocol):
    """A backend: one way to compute Algorithm 1's lists (§4.4), built once a model."""

    def supports(self, n_users: int, n_candidates: int) -> bool:
        """Whether the backend has the memory for a batch of this shape."""
        ...

    def bind(self, users: BoundMargins) -> RankerBatch:
        """The backend for a batch of users, whose projections are computed once."""
        ...


def compile_kernels() -> None:
    """Compiles the kernels that the first list would compile: some seconds, once a machine."""
    ranking_kernel()
    product_kernel()


class ExactRanker:
    """Ranks candidates by pairwise comparison, equal to the literal Algorithm 1 on its margins.

    Additive models are sorted by s_ui, which gives the list of Algorithm 1. Other models take the
    resumable scan: compiled by numba on a CPU or by Triton on a GPU, otherwise (and always with
    ``compiled=False``) in torch. One ranker serves a model, and threads may share the ranker.
    ``on_pairs`` is called with the number of pairs that a call of ``rank`` compared. ``margins``
    are the model's, if the caller has them.
    """

    def __init__(
        self,
        model: PairwiseRanker,
        *,
        compiled: bool = True,
        on_pairs: Callable[[int], None] | None = None,
        margins: Margins | None = None,
    ) -> None:
        if model.device.type == "cuda" and not _is_exact():
            warnings.warn(
                "lists on a GPU may be inexact: torch.set_float32_matmul_precision is not highest",
                stacklevel=2,
            )
        self.margins = margins_of(model) if margins is None else margins
        self.on_pairs = on_pairs
        self.n_items = model.n_items
        self.device = model.device
        self.may_compile = compiled
        """Whether compiled code may be used."""

    @cached_property
    def backend(self) -> Ranker:
        """The fastest backend for this model and machine, made at the first use."""
        if not self.margins.additive and self.may_compile:
            compiled = numba_ranker(self.margins) or triton_ranker(self.margins)
            if compiled is not None:
                return compiled
        return self.fallback

    @cached_property
    def fallback(self) -> Ranker:
        """The backend for batches that ``backend`` does not support."""
        if self.margins.additive:
            return AdditiveRanker()
        return TorchRanker(self.margins)

    def free_graphs(self) -> None:
        """Frees the memory that CUDA graphs of earlier passes keep."""
        if isinstance(backend := vars(self).get("backend"), TritonRanker):
            backend.free_graphs()

    def bind(self, users: Tensor, boost: Tensor | None = None) -> BoundRanker:
        """The ranker for several calls with the same (B, E) user vectors.

        ``boost`` (n_items,) in float64 is added to the scores of items: the margin of i over j is
        boost_i − boost_j larger.
        """
        return BoundRanker(self, users, boost)

    def rank(
        self, users: Tensor, candidates: Tensor, k: int, strategy: Strategy = "algorithm1"
    ) -> Tensor:
        """Top ``k`` of each user's candidates.

        Args:
            users: (B, E) user vectors.
            candidates: (B, M) item rows in the order that decides ties, each row filled from the
                left and padded with −1.
            k: The length of the lists.
            strategy: Algorithm 1, or another order: by wins or by mean probability against all
                other candidates. The other orders compute all margins of the candidates.

        Returns:
            (B, min(k, M)) item rows, best first, padded with −1.

        Raises:
            ConfigError: There is no such strategy.
            IndexError: The model has no such item.
        """
        return self.bind(users).rank(candidates, k, strategy)

    def top(
        self,
        users: Tensor,
        k: int,
        allowed: Tensor | None = None,
        order: Tensor | None = None,
        boost: Tensor | None = None,
    ) -> Tensor:
        """Top ``k`` of the whole catalogue for a model that is a product of vectors.

        Args:
            users: (B, E) user vectors.
            k: The length of the lists.
            allowed: (B, n_items) whether an item may be in the list; by default all items may.
            order: (n_items,) numbers of the items; the lower of two items that tie comes first; by
                default the rows.
            boost: (n_items,) numbers to add to the scores, as for ``bind``.

        Returns:
            (B, min(k, n_items)) item rows, best first, padded with −1.

        Raises:
            ValueError: The model is more than a product of vectors.
        """
        if not self.margins.sortable:
            raise ValueError("this model is not a product of vectors: rank candidates")
        users = users.to(self.device)
        allowed, order, boost = (
            None if x is None else x.to(self.device) for x in (allowed, order, boost)
        )
        return top_of_catalogue(self.margins, users, k, allowed, order, self.may_compile, boost)

    def moved_items(self, items: Tensor) -> Tensor:
        """Item rows on the device of the model.

        Raises IndexError for a row that the model does not have, if the rows go from a CPU to a
        GPU. On a GPU such a row would end every later use of the device by this process.
        """
        if self.device.type == "cuda" and items.device.type == "cpu" and items.numel():
            low, high = (int(row) for row in items.aminmax())
            if low < PAD or high >= self.n_items:
                wrong = low if low < PAD else high
                raise IndexError(f"no item has the row {wrong}: there are {self.n_items:,}")
        return _moved(items, self.device)

    def all_margins(self, users: Tensor, candidates: Tensor) -> Tensor:
        """(B, M, M) margins of each candidate over each; 0 in the padding. As for ``rank``."""
        return self.bind(users).margins.all_margins(self.moved_items(candidates))

    def compare(self, users: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Margins z_uij − z_uji of (B, E) users and (B, L) items i and j → (B, L) float64."""
        users, i, j = _moved(users, self.device), self.moved_items(i), self.moved_items(j)
        return self.margins.bind(users).compare(i, j)

    @torch.inference_mode()
    def linear_scores(self, users: Tensor, items: Tensor) -> Tensor:
        """s_ui in float64 of (B, E) user vectors and (B, M) items → (B, M)."""
        users = _moved(users, self.device)
        bound = self.margins.bind(users, compiled=self.may_compile)
        return bound.all_linear_scores(self.moved_items(items))

    @torch.inference_mode()
    def mean_margins(self, users: Tensor, anchors: Tensor, boost: Tensor | None = None) -> Tensor:
        """The mean margins of all items over (A,) anchors: (B, E) user vectors → (B, n_items)."""
        margins, anchors = self.bind(users, boost).margins, self.moved_items(anchors)
        means = torch.zeros((len(users), self.n_items), dtype=torch.float64, device=self.device)
        if not len(anchors):
            return means
        for start in range(0, self.n_items, ITEMS_AT_ONCE):
            stop = min(start + ITEMS_AT_ONCE, self.n_items)
            block = torch.arange(start, stop, device=self.device)
            means[:, start:stop] = margins.mean_margins(anchors, block)
        return means


class BoundRanker:
    """An ``ExactRanker`` for (B, E) user vectors, whose projections are computed once."""

    def __init__(self, ranker: ExactRanker, users: Tensor, boost: Tensor | None = None) -> None:
        self._ranker = ranker
        boost = None if boost is None else _moved(boost, ranker.device)
        moved = _moved(users, ranker.device)
        self._users = ranker.margins.bind(moved, boost, compiled=ranker.may_compile)

    @lazy_property
    def _batch(self) -> RankerBatch:
        return self._ranker.backend.bind(self._users)

    @property
    def margins(self) -> UserMargins:
        """The margins of these users: compiled, where the backend is."""
        return self._batch if isinstance(self._batch, NumbaBatch) else self._users

    def rank(self, candidates: Tensor, k: int, strategy: Strategy = "algorithm1") -> Tensor:
        """See ``ExactRanker.rank``."""
        if strategy not in STRATEGIES:
            raise ConfigError(f"unknown strategy {strategy!r}: {', '.join(STRATEGIES)}")
        candidates = self._ranker.moved_items(candidates)
        k = min(k, candidates.shape[1])
        on_pairs = self._ranker.on_pairs
        if strategy != "algorithm1":
            lengths = (candidates != PAD).sum(dim=1)
            if on_pairs is not None:
                on_pairs(int((lengths * (lengths - 1) // 2).sum()))
            score = wins if strategy == "copeland" else mean_preference
            order = top_positions(score(self.margins.all_margins(candidates), lengths), lengths, k)
            return candidates.gather(1, order.clamp(min=0)).masked_fill_(order == PAD, PAD)
        if self._ranker.backend.supports(*candidates.shape):
            ranked, pairs = self._batch.rank(candidates, k)
        else:
            ranked, pairs = self._ranker.fallback.bind(self._users).rank(candidates, k)
        if on_pairs is not None and pairs is not None:
            on_pairs(int(pairs.sum()))
        return ranked


@torch.inference_mode()
def top_allowed(scores: Tensor, allowed: Tensor, order: Tensor, m: int) -> Tensor:
    """The best ``m`` allowed items a user, best first, padded with −1: (B, ≤ m).

    ``scores`` and ``allowed`` are (B, n_items). Of items with equal scores the one that is lower in
    (n_items,) ``order`` comes first.
    """
    m = min(m, scores.shape[1])
    scores = scores.nan_to_num(nan=-torch.inf)
    top = torch.topk(scores.masked_fill(~allowed, -torch.inf), m, dim=1)
    by_order = order[top.indices].argsort(dim=1)
    items, values = top.indices.gather(1, by_order), top.values.gather(1, by_order)
    by_score = values.argsort(dim=1, descending=True, stable=True)
    items, values = items.gather(1, by_score), values.gather(1, by_score)
    return torch.where(values > -torch.inf, items, PAD)


def _is_exact() -> bool:
    """Whether a GPU multiplies matrices of float32 in float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the program has set it by a newer function, which this one refuses
        return torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a copy of a usual batch to a GPU is asynchronous."""
    if x.device == device:
        return x
    if device.type == "cuda" and x.device.type == "cpu" and x.nbytes <= MAX_PINNED_BYTES:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
