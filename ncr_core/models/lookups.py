"""Rows of an embedding table, which one process holds or ranks share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def table_rows(rows: Tensor, table: Tensor, *, sparse: bool = False) -> Tensor:
    """Rows (…) of a table (n, F) → (…, F).

    Args:
        rows: the numbers of rows, the same on all ranks for a sharded table.
        table: a tensor, or a DTensor of which each rank has some rows. Every rank gets all
            requested rows, and the gradient of its own rows.
        sparse: whether the gradient comes by rows; without effect for a sharded table.
    """
    if is_sharded(table):
        return _sharded_rows(rows, table)
    return nn.functional.embedding(rows, table, sparse=sparse)


def is_sharded(table: Tensor) -> bool:
    """Whether a table is a DTensor, of which each rank has some rows."""
    return hasattr(table, "full_tensor")


def _sharded_rows(rows: Tensor, table: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = table.device_mesh
    same = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    # Each rank has zeros for the rows of others: their sum is exact.
    found: Any = nn.functional.embedding(same, table)
    local: Tensor = found.redistribute(mesh, [Replicate()]).to_local()
    return local
