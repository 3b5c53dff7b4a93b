"""Margins z_uij − z_uji, decided the same way whoever else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ncr_core.models.tables import PairTables

CLOSE = 1e-4  # float32 margins smaller than this are computed again in float64
TIE = 1e-12  # and float64 margins smaller than this are ties


class Margins:
    """Computes margins of one model from its tables.

    Products of different batch shapes round differently, so a float32 margin near zero could change
    its sign with the company it is computed in. Margins under ``CLOSE`` are therefore computed in
    float64 and, where even that leaves nothing but rounding (``TIE``), set to zero: an order never
    depends on the batch, and items with equal parameters tie exactly.
    """

    def __init__(self, tables: PairTables) -> None:
        self.double = tables.to(torch.float64)
        self.single = tables.to(torch.float32)

    @property
    def additive(self) -> bool:
        return self.double.additive

    def bind(self, users: Tensor) -> BoundMargins:
        """For (B, E) user vectors."""
        return BoundMargins(self, users)


class BoundMargins:
    """The margins of a batch of users; their projections are computed once."""

    def __init__(self, margins: Margins, users: Tensor) -> None:
        self._tables = (margins.single, margins.double)
        self._users = tuple(users.to(dtype) for dtype in (torch.float32, torch.float64))
        self._projected = tuple(
            tables.tower.project_user(users) if tables.tower else None for tables in self._tables
        )

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
        margin = self._compute(rows, i, j, double=False).double()
        close = (margin.abs() < CLOSE) & (i != j)
        margin[i == j] = 0.0
        if bool(close.any()):
            at = close.nonzero(as_tuple=True)
            exact = self._compute(
                rows[at[0]], i[at].unsqueeze(1), j[at].unsqueeze(1), double=True
            ).squeeze(1)
            margin[at] = torch.where(exact.abs() < TIE, 0.0, exact)
        return margin

    def _compute(self, rows: Tensor, i: Tensor, j: Tensor, *, double: bool) -> Tensor:
        linear = self.linear_scores(rows, i, double=double) - self.linear_scores(
            rows, j, double=double
        )
        tower, projected = self._tables[double].tower, self._projected[double]
        if tower is None or projected is None:
            return linear
        own = tower.own(self._users[double][rows])
        return linear + tower.margins(projected[rows], own, i, j)
