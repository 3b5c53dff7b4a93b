"""Margins z_uij − z_uji, decided the same way whoever else is in the batch."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from ncr_core.models.tables import PairTables, TowerTable

PAD = -1  # where a list of item rows has ended
CLOSE = 1e-4  # float32 margins smaller than this, times what follows, are computed in float64
USUAL_INPUTS = 32.0  # of the first activation: CLOSE is a thousand times float32's error up to here
USUAL_GAIN = 100.0  # of the layers above, as the product of their norms
TIE = 1e-12  # float64 margins smaller than this are ties,
ROUNDING = 2e-15  # and those smaller than this times the size of what they are a sum of
TIES = (TIE, ROUNDING)


class Margins:
    """Computes margins of one model from its tables.

    Products of different batch shapes round differently, so a float32 margin near zero could change
    its sign with the company it is computed in. Small margins are therefore computed in float64
    and, where even that leaves nothing but rounding (``TIE``), set to zero: an order does not
    depend on the batch, and items with equal parameters tie exactly. Small is ``CLOSE`` times the
    size of what the tower's margin is a sum of, and times ``caution`` for uncommonly large weights.
    """

    def __init__(self, tables: PairTables) -> None:
        self.double = tables.to(torch.float64)
        self.single = tables.to(torch.float32)
        self.largest_input, gain = _sizes(tables.tower) if tables.tower else (0.0, 1.0)
        self.more_than_usual = max(1.0, gain / USUAL_GAIN)

    def caution(self, projected: Tensor) -> Tensor:
        """How much more than usual float32 may err: (B, h) C_u of users → (B,) of at least 1."""
        if not projected.numel():
            return torch.ones(len(projected), dtype=torch.float64, device=projected.device)
        inputs = projected.abs().amax(dim=1).double() + self.largest_input
        return (inputs / USUAL_INPUTS).clamp(min=1.0) * self.more_than_usual

    @property
    def additive(self) -> bool:
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
        """Whether s_ui is a product of vectors and nothing else."""
        tables = self.double
        return self.additive and not tables.points and tables.linear is not None

    def bind(self, users: Tensor) -> BoundMargins:
        """For (B, E) user vectors."""
        return BoundMargins(self, users)


class BoundMargins:
    """The margins of a batch of users; their projections are computed once, if they are needed."""

    def __init__(self, margins: Margins, users: Tensor) -> None:
        self._margins = margins
        self._tables = (margins.single, margins.double)
        self._users = tuple(users.to(dtype) for dtype in (torch.float32, torch.float64))

    @cached_property
    def _projected(self) -> tuple[Tensor | None, ...]:
        return tuple(
            tables.tower.project_user(users) if tables.tower else None
            for tables, users in zip(self._tables, self._users, strict=True)
        )

    @cached_property
    def _caution(self) -> Tensor | None:
        own = self._projected[1]
        return None if own is None else self._margins.caution(own)

    def linear_scores(self, rows: Tensor, items: Tensor, *, double: bool) -> Tensor:
        """s_ui, the additive part, of (R,) batch rows and (R, L) items → (R, L)."""
        tables, users = self._tables[double], self._users[double]
        scores = torch.zeros(items.shape, dtype=users.dtype, device=items.device)
        for scale, point in tables.points:
            scores += scale * point.scores(users[rows], items)
        table = tables.linear
        if table is None:
            return scores
        scores += (users[rows, table.columns].unsqueeze(1) * table.items[items]).sum(dim=2)
        return scores if table.bias is None else scores + table.bias[items]

    def __call__(self, rows: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """How far i is preferred to j: (R,) batch rows, (R, L) items each → (R, L) float64."""
        margin = self.linear_scores(rows, i, double=True)
        margin -= self.linear_scores(rows, j, double=True)
        if self._caution is None:
            margin[(margin.abs() < TIE) | (i == j)] = 0.0
            return margin
        deep, size = self._tower(rows, i, j, double=False)
        bound = CLOSE * self._caution[rows].unsqueeze(1) * size.clamp(min=1.0)
        # What is not a number in float32 may be one in float64.
        close = ~((margin + deep).abs() >= bound) & (i != j)
        exact = margin[close]
        margin += deep
        margin[i == j] = 0.0
        if bool(close.any()):
            row, column = close.nonzero(as_tuple=True)
            at = i[row, column].unsqueeze(1), j[row, column].unsqueeze(1)
            deep, size = (x.squeeze(1) for x in self._tower(rows[row], *at, double=True))
            exact += deep
            margin[close] = torch.where(exact.abs() < (ROUNDING * size).clamp(min=TIE), 0.0, exact)
        return margin

    def _tower(self, rows: Tensor, i: Tensor, j: Tensor, *, double: bool) -> tuple[Tensor, Tensor]:
        tower, projected = self._tables[double].tower, self._projected[double]
        if tower is None or projected is None:
            raise ValueError("an additive model has no tower")
        own = tower.own(self._users[double][rows])
        return tower.margins(projected[rows], own, i, j)


def _sizes(tower: TowerTable) -> tuple[float, float]:
    """The largest that items can put into the first activation, and by how much the layers above
    may enlarge an error in their inputs."""
    inputs, gain = 0.0, 1.0
    for table in (tower.first, tower.second):
        if table.numel():
            low, high = torch.aminmax(table)
            inputs += max(-float(low), float(high))
    for weight, _ in tower.layers:
        finite = bool(weight.isfinite().all())
        gain *= float(torch.linalg.matrix_norm(weight, ord=2)) if finite else math.inf
    return inputs, gain
