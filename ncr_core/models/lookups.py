"""Rows of an embedding table, which one process holds or ranks share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def table_rows(rows: Tensor, table: Tensor, *, sparse: bool = False) -> Tensor:
    """Rows (…) of a table (n, F) → (…, F), or of (n,) numbers → (…).

    Args:
        rows: the numbers of rows, the same on all ranks for a sharded table.
        table: a tensor, or a DTensor (n, F) of which each rank has some rows. Every rank gets all
            requested rows, and the gradient of its own rows.
        sparse: whether the gradient comes by rows; without effect for a sharded table.
    """
    if is_sharded(table):
        return _sharded_rows(rows, table)
    if table.ndim == 1:
        if not sparse:
            return table[rows]
        return torch.gather(table, 0, rows.flatten(), sparse_grad=True).view(rows.shape)
    return nn.functional.embedding(rows, table, sparse=sparse)


def is_sharded(table: Tensor) -> bool:
    """Whether a table is a DTensor, of which each rank has some rows."""
    return hasattr(table, "full_tensor")


def first_row(rows: int, rank: int, ranks: int) -> int:
    """The first of so many rows of a sharded table that a rank has, as `torch.chunk` has it."""
    return min(rows, -(-rows // ranks) * rank)


def _sharded_rows(rows: Tensor, table: Any) -> Tensor:
    # The gradient of a DTensor's own look-up is as large as the whole table on every rank.
    mesh, local = table.device_mesh, table.to_local()
    first = first_row(len(table), mesh.get_local_rank(), mesh.size())
    is_own = (rows >= first) & (rows < first + len(local))
    found = local.new_zeros(*rows.shape, *local.shape[1:])
    found[is_own] = nn.functional.embedding(rows[is_own] - first, local)
    # Each rank has zeros for the rows of others: their sum is exact.
    every: Tensor = _SumOfRanks.apply(found, mesh.get_group())  # type: ignore[no-untyped-call]
    return every


class _SumOfRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, which all compute the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        every = own.clone()
        torch.distributed.all_reduce(every, group=group)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
