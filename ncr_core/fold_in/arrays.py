"""The tables of a model as the compiled fit takes them, made once a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ncr_core.models.tables import LinearTable, PairTables, TowerTable

UNROLLED = 4  # widths are padded to a multiple of it


@dataclass(frozen=True, slots=True, eq=False)
class FitArrays:
    """Tables of float32, or of another type for tests.

    A user's vector u becomes t = to_tables·u + offset: the user's part of s_ui, one number a
    column of ``linear``, and C_u.
    """

    to_tables: npt.NDArray[np.float64]
    """(n, E)"""
    offset: npt.NDArray[np.float64]
    """(n,)"""
    tables: tuple[Any, ...]
    """linear (n_items, d), bias (n_items or 0,), first and second (n_items, h)."""
    tower: tuple[Any, ...]
    """widths, weights, the same transposed, biases, w."""


def fit_arrays(tables: PairTables, size: int, dtype: torch.dtype) -> FitArrays | None:
    """The arrays for user vectors of this size; None for what the compiled fit is not made for:
    towers over one item, and products that join the last layer (eq. 24)."""
    tower, linear = tables.tower, tables.linear
    if tables.points or (tower is not None and tower.items is not None):
        return None
    parts, offsets = [], []
    if linear is not None:
        parts.append(_columns(torch.eye(linear.items.shape[1]), linear.columns, size))
        offsets.append(torch.zeros(linear.items.shape[1]))
    if tower is not None:
        weight, bias = (_padded_rows(x) for x in (tower.user_weight, tower.user_bias))
        parts.append(_columns(weight, tower.columns, size))
        offsets.append(bias)
    n_items = len(linear.items) if linear is not None else len(tower.first) if tower else 0
    return FitArrays(
        torch.cat([part.double().cpu() for part in parts]).numpy(),
        torch.cat([offset.double().cpu() for offset in offsets]).numpy(),
        (*_linear(linear, n_items, dtype), *_items(tower, n_items, dtype)),
        _tower(tower, dtype),
    )


def _columns(weight: Tensor, columns: slice, size: int) -> Tensor:
    """A map of a part of a vector as one of the whole vector."""
    start = columns.start or 0
    return pad(weight, (start, size - start - weight.shape[1]))


def _linear(table: LinearTable | None, n_items: int, dtype: torch.dtype) -> tuple[Any, Any]:
    if table is None:
        return _array(torch.zeros(n_items, 0), dtype), _array(torch.zeros(0), dtype)
    bias = torch.zeros(0) if table.bias is None else table.bias
    return _array(table.items, dtype), _array(bias, dtype)


def _items(tower: TowerTable | None, n_items: int, dtype: torch.dtype) -> tuple[Any, Any]:
    if tower is None:
        none = _array(torch.zeros(n_items, 0), dtype)
        return none, none
    first, second = (_padded_rows(x.T).T for x in (tower.first, tower.second))
    return _array(first, dtype), _array(second, dtype)


def _tower(tower: TowerTable | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """The layers one after the other. A padded unit has no inputs, and gives act(0) = 0."""
    none = torch.zeros(0)
    if tower is None:
        return (np.zeros(1, dtype=np.int64), *[_array(none, dtype)] * 4)
    layers = [(_padded_rows(_padded_rows(w).T).T, _padded_rows(b)) for w, b in tower.layers]
    widths = [_up(tower.first.shape[1]), *(len(bias) for _, bias in layers)]
    return (
        np.array(widths, dtype=np.int64),
        _array(torch.cat([w.flatten().cpu() for w, _ in layers] or [none]), dtype),
        _array(torch.cat([w.T.flatten().cpu() for w, _ in layers] or [none]), dtype),
        _array(torch.cat([b.cpu() for _, b in layers] or [none]), dtype),
        _array(_padded_rows(tower.weight), dtype),
    )


def _padded_rows(x: Tensor) -> Tensor:
    missing = _up(len(x)) - len(x)
    return x if not missing else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def _up(n: int) -> int:
    return -(-n // UNROLLED) * UNROLLED


def _array(x: Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """What is of this type and on the CPU already is not copied."""
    return np.ascontiguousarray(x.detach().to(dtype).cpu().numpy())
