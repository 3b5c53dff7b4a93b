"""Margins z_uij − z_uji, with signs that do not depend on the rest of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ncr_core.models.scoring_tables import PairTables, TowerTable
from ncr_core.optional_imports import numba_kernel

PAD = -1  # where a list of item rows has ended
CLOSE = 1e-4  # float32 margins smaller than this, times what follows, are computed in float64
USUAL_INPUTS = 32.0  # of the first activation: CLOSE is a thousand times float32's error up to here
USUAL_GAIN = 100.0  # of the layers above, as the product of their norms
TIE = 1e-12  # float64 margins smaller than this are ties,
ROUNDING = 2e-15  # and those smaller than this times the size of what they are a sum of
TIES = (TIE, ROUNDING)
MAX_PAIRS = 2**17  # at once, which bounds their memory: some hundred bytes a pair at d = 8
MAX_GPU_INPUTS = 2**26  # of the towers' first layers, for the mean margins: some GB
FEW_PAIRS = 2**16  # on a GPU: float64 for all of them is faster than waiting for the near ones
NO_BIAS = np.zeros(0)


Value = TypeVar("Value")


def product_kernel() -> ModuleType | None:
    """The compiled code for products of vectors; None without numba, or if compilation fails."""
    return numba_kernel("ncr_core.ranking.backends.additive_kernel")


class lazy_property(Generic[Value]):  # noqa: N801 - used like a function
    """A property that is computed once an object, at the first use, and without a lock.

    The lock of Python 3.11's `functools.cached_property` is one for all objects of a class: batches
    in two threads would wait for each other.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        """The value; later look-ups find the value in the object itself."""
        value = self._compute(instance)
        vars(instance)[self._name] = value
        return value


class Margins:
    """Computes margins of one model from its tables.

    Products of different batch shapes round differently, so the sign of a float32 margin near zero
    could depend on the batch. Margins near zero are therefore computed in float64. A float64 margin
    within the rounding error (``TIE``) is set to zero. An order then does not depend on the batch,
    and items with equal parameters tie exactly.

    A margin is near zero below ``CLOSE`` times the size of the terms of the tower's margin, and
    times ``caution`` for uncommonly large weights.
    """

    def __init__(self, tables: PairTables, single: PairTables | None = None) -> None:
        """``single`` are the tables in float32, if the caller has them."""
        self.double = tables.to(torch.float64)
        self.single = tables.to(torch.float32) if single is None else single
        self.largest_input, gain = _sizes(tables.tower) if tables.tower else (0.0, 1.0)
        self.more_than_usual = max(1.0, gain / USUAL_GAIN)

    def caution(self, projected: Tensor) -> Tensor:
        """The factor of float32's usual error, at least 1: (B, h) C_u of users → (B,)."""
        if not projected.numel():
            return torch.ones(len(projected), dtype=torch.float64, device=projected.device)
        inputs = projected.abs().amax(dim=1).double() + self.largest_input
        return (inputs / USUAL_INPUTS).clamp(min=1.0) * self.more_than_usual

    @property
    def additive(self) -> bool:
        """Whether every margin is a difference of scores s_ui."""
        return self.double.additive

    @cached_property
    def linear_sizes(self) -> tuple[float, float]:
        """The largest norm of an item's vector in s_ui, and the largest bias."""
        table = self.double.linear
        if table is None or not len(table.items):
            return 0.0, 0.0
        bias = 0.0 if table.bias is None else float(table.bias.abs().max())
        return float(table.items.norm(dim=1).max()), bias

    @property
    def sortable(self) -> bool:
        """Whether the model is a product of vectors alone."""
        tables = self.double
        return self.additive and not tables.points and tables.linear is not None

    def bind(
        self, users: Tensor, boost: Tensor | None = None, *, compiled: bool = False
    ) -> BoundMargins:
        """The margins of (B, E) user vectors; ``boost`` (n_items,) float64 adds to every s_ui.

        ``compiled`` allows compiled code on a CPU, for a product of vectors.
        """
        return BoundMargins(self, users, boost, compiled=compiled)


class BoundMargins:
    """The margins of a batch of users, whose projections are computed once, at the first use.

    A boost b, which all users of the batch share, is a part of the scores: the margin of i over j
    is b_i − b_j larger.
    """

    def __init__(
        self, margins: Margins, users: Tensor, boost: Tensor | None, *, compiled: bool
    ) -> None:
        self._margins = margins
        self._compiled = compiled
        self.users = users
        self.boost = boost
        """(n_items,) in float64, on the users' device; None: no boost."""

    @lazy_property
    def _single(self) -> tuple[PairTables, Tensor, Tensor | None]:
        return self._cast(self._margins.single, torch.float32)

    @lazy_property
    def _double(self) -> tuple[PairTables, Tensor, Tensor | None]:
        return self._cast(self._margins.double, torch.float64)

    def _cast(
        self, tables: PairTables, dtype: torch.dtype
    ) -> tuple[PairTables, Tensor, Tensor | None]:
        users = self.users.to(dtype)
        return tables, users, tables.tower.project_user(users) if tables.tower else None

    @property
    def projected(self) -> Tensor | None:
        """(B, h) C_u in float64; None for an additive model."""
        return self._double[2]

    @lazy_property
    def caution(self) -> Tensor:
        """(B,) factors of float32's usual error, at least 1; ValueError for an additive model."""
        if self.projected is None:
            raise ValueError("an additive model has no tower")
        return self._margins.caution(self.projected)

    def linear_scores(self, rows: Tensor, items: Tensor, *, double: bool) -> Tensor:
        """s_ui, the additive part, of (R,) batch rows and (R, L) items → (R, L)."""
        tables, users, _ = self._double if double else self._single
        scores = torch.zeros(items.shape, dtype=users.dtype, device=items.device)
        if self.boost is not None:
            scores += self.boost[items]
        for scale, point in tables.points:
            scores += scale * point.scores(users[rows], items)
        table = tables.linear
        if table is None:
            return scores
        scores += (users[rows, table.columns].unsqueeze(1) * table.items[items]).sum(dim=2)
        return scores if table.bias is None else scores + table.bias[items]

    def all_linear_scores(self, items: Tensor) -> Tensor:
        """(B, M) s_ui in float64, element by element: independent of the rest of the batch."""
        kernel = product_kernel() if self._compiled and self._margins.sortable else None
        if kernel is not None and items.device.type == "cpu":
            return self._product_scores(kernel, items)
        rows = torch.arange(len(items), device=items.device)
        width = max(1, MAX_PAIRS // max(1, len(items)))
        blocks = torch.split(items, width, dim=1)
        return torch.cat([self.linear_scores(rows, part, double=True) for part in blocks], dim=1)

    def _product_scores(self, kernel: ModuleType, items: Tensor) -> Tensor:
        """As ``all_linear_scores``, for a product of vectors; copies no vectors of the items."""
        table = self._margins.double.linear
        assert table is not None  # noqa: S101 - the model is a product
        vectors = self.users[:, table.columns]
        if vectors.dtype != torch.float32:
            vectors = vectors.double()
        rows = items.flatten().numpy()
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(table.items):
            raise IndexError(f"the rows of the items are 0 to {len(table.items) - 1}")
        scores = np.empty(len(rows))
        kernel.score_rows(
            vectors.contiguous().numpy(),
            table.items.numpy(),
            NO_BIAS if table.bias is None else table.bias.numpy(),
            rows,
            items.shape[1] * np.arange(len(items) + 1),
            scores,
        )
        if self.boost is not None:
            scores += self.boost.numpy()[rows]
        return torch.from_numpy(scores).view(items.shape)

    def __call__(self, rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The margins of i over j: (R,) batch rows, (R, L) items each → (R, L) float64."""
        margin = self.linear_scores(rows, i, double=True)
        margin -= self.linear_scores(rows, j, double=True)
        if self.projected is None:
            return margin.masked_fill_((margin.abs() < TIE) | (i == j), 0.0)
        if margin.is_cuda and margin.numel() <= FEW_PAIRS:
            deep, size = self._tower(rows, i, j, double=True)
            margin += deep
            return margin.masked_fill_(
                (margin.abs() < (ROUNDING * size).clamp(min=TIE)) | (i == j), 0.0
            )
        deep, size = self._tower(rows, i, j, double=False)
        bound = CLOSE * self.caution[rows].unsqueeze(1) * size.clamp(min=1.0)
        # What is not a number in float32 may be one in float64.
        close = ~((margin + deep).abs() >= bound) & (i != j)
        row, column = close.nonzero(as_tuple=True)
        exact = margin[row, column]
        margin = margin.add_(deep).masked_fill_(i == j, 0.0)
        if len(row):
            pairs = i[row, column].unsqueeze(1), j[row, column].unsqueeze(1)
            deep, size = (x.squeeze(1) for x in self._tower(rows[row], *pairs, double=True))
            exact += deep
            is_tie = exact.abs() < (ROUNDING * size).clamp(min=TIE)
            margin[row, column] = exact.masked_fill_(is_tie, 0.0)
        return margin

    @torch.inference_mode()
    def all_margins(self, candidates: Tensor) -> Tensor:
        """(B, M) item rows → (B, M, M) margins of each over each; 0 in the padding."""
        candidates = candidates.to(self.users.device)
        lengths, items = (candidates != PAD).sum(dim=1), candidates.clamp(min=0)
        n, m = items.shape
        if self._margins.additive:
            scores = self.all_linear_scores(items)
            is_same = items.unsqueeze(2) == items.unsqueeze(1)
            margins = _differences(scores.unsqueeze(2), scores.unsqueeze(1), is_same)
        else:
            rows = torch.arange(n, device=self.users.device)
            margins = torch.zeros((n, m, m), dtype=torch.float64, device=self.users.device)
            width = max(1, MAX_PAIRS // max(1, n * m))
            for start in range(0, m, width):
                block = items[:, start : start + width]
                i, j = block.repeat_interleave(m, dim=1), items.repeat(1, block.shape[1])
                margins[:, start : start + width] = self(rows, i, j).view(n, -1, m)
        inside = torch.arange(m, device=self.users.device) < lengths.unsqueeze(1)
        return margins * (inside.unsqueeze(1) & inside.unsqueeze(2))

    @torch.inference_mode()
    def list_margins(self, ranked: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """(B, k) lists and (R,) other items → (B, k, R) margins, and (B, k) over the next item."""
        b, k = ranked.shape
        items = ranked.clamp(min=0).to(self.users.device)
        others = others.to(self.users.device)
        if self._margins.additive:  # a score an item, not a pair
            scores = self.all_linear_scores(torch.cat([items, others.expand(b, -1)], dim=1))
            own, of_others = scores[:, :k], scores[:, k:]
            is_same = items.unsqueeze(2) == others
            following = items.roll(-1, dims=1)
            return (
                _differences(own.unsqueeze(2), of_others.unsqueeze(1), is_same),
                _differences(own, own.roll(-1, dims=1), items == following),
            )
        i, j = items.repeat_interleave(len(others), dim=1), others.repeat(k).expand(b, -1)
        over_others = self.compare(i, j).view(b, k, len(others))
        return over_others, self.compare(items, items.roll(-1, dims=1))

    @torch.inference_mode()
    def compare(self, i: Tensor, j: Tensor) -> Tensor:
        """Margins of (B, L) items i over items j → (B, L) float64."""
        rows = torch.arange(len(self.users), device=self.users.device)
        i, j = i.to(self.users.device), j.to(self.users.device)
        width = max(1, MAX_PAIRS // max(1, len(self.users)))
        blocks = zip(torch.split(i, width, dim=1), torch.split(j, width, dim=1), strict=True)
        return torch.cat([self(rows, *block) for block in blocks], dim=1)

    @torch.inference_mode()
    def mean_margins(self, anchors: Tensor, block: Tensor) -> Tensor:
        """The mean margins of (T,) or (B, T) items over (A,) anchors → (B, T) float64.

        The tower's part is computed in float32, and in float64 where that is no finite number: a
        candidate's place may depend on the rounding, but not the ranker's order of candidates. The
        mean over no anchors is 0.
        """
        n, n_anchors = len(self.users), len(anchors)
        items = block.expand(n, -1)
        if not n_anchors:
            return torch.zeros(items.shape, dtype=torch.float64, device=items.device)
        linear = self.all_linear_scores(torch.cat([anchors.expand(n, -1), items], dim=1))
        means = linear[:, n_anchors:] - linear[:, :n_anchors].mean(dim=1, keepdim=True)
        if self._margins.additive:
            return means
        rows = torch.arange(n, device=self.users.device)
        width = max(1, self._pairs_at_once // max(1, n * n_anchors))
        for start in range(0, items.shape[1], width):
            i = items[:, start : start + width].repeat_interleave(n_anchors, dim=1)
            j = anchors.repeat(i.shape[1] // n_anchors).expand(n, -1)
            deep, _ = self._tower(rows, i, j, double=False)
            means[:, start : start + width] += deep.view(n, -1, n_anchors).mean(dim=2)
        row, column = (~means.isfinite()).nonzero(as_tuple=True)
        if len(row):
            i = items[row, column].unsqueeze(1).expand(-1, n_anchors)
            deep, _ = self._tower(row, i, anchors.expand(len(row), -1), double=True)
            of_anchors = linear[row, :n_anchors]
            exact = linear[row, n_anchors + column].unsqueeze(1) - of_anchors + deep
            means[row, column] = exact.mean(dim=1)
        return means

    @property
    def _pairs_at_once(self) -> int:
        """Pairs whose margins in float32 are computed at once."""
        tower = self._margins.single.tower
        if tower is None or self.users.device.type == "cpu":
            return MAX_PAIRS
        return max(MAX_PAIRS, MAX_GPU_INPUTS // max(1, tower.first.shape[1]))

    def _tower(self, rows: Tensor, i: Tensor, j: Tensor, *, double: bool) -> tuple[Tensor, Tensor]:
        tables, users, projected = self._double if double else self._single
        tower = tables.tower
        if tower is None or projected is None:
            raise ValueError("an additive model has no tower")
        return tower.margins(projected[rows], tower.user_columns(users[rows]), i, j)


def _differences(one: Tensor, other: Tensor, is_same: Tensor) -> Tensor:
    """The margins of an additive model, from scores of items that may be the same."""
    margins = one - other
    return margins.masked_fill_((margins.abs() < TIE) | is_same, 0.0)


def _sizes(tower: TowerTable) -> tuple[float, float]:
    """The largest input of the first activation by items, and the gain of the layers above.

    The gain is the largest factor by which these layers may enlarge an error in their inputs.
    """
    inputs, gain = 0.0, 1.0
    for table in (tower.first, tower.second):
        if table.numel():
            low, high = torch.aminmax(table)
            inputs += max(-float(low), float(high))
    for weight, _ in tower.layers:
        on_cpu = weight.cpu()  # a small matrix, whose singular values take a GPU longer
        finite = bool(on_cpu.isfinite().all())
        gain *= float(torch.linalg.matrix_norm(on_cpu, ord=2)) if finite else math.inf
    return inputs, gain
