"""The ranking tables of a model, computed for some of its items at a time.

`PairwiseRanker.tables` makes the tables of all items at once. `TableBlocks` gives them in blocks,
to write into files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ncr_core.data.array_storage import table_storage
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.scoring_tables import PairTables
from ncr_core.ranking.margins import Margins

BLOCK_ITEMS = 2**16  # computed at a time

Tree = TypeVar("Tree")


class TableBlocks:
    """The tensors of a model's tables that have a row for each item, in float64 and in float32."""

    def __init__(self, model: PairwiseRanker) -> None:
        self._model = model
        self._template = _both(model_of_items(model, slice(0, 1)))

    @property
    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The type and the shape of the tensors of all items, by their names."""
        return {
            name: (tensor.dtype, (self._model.n_items, *tensor.shape[1:]))
            for name, tensor in _of_rows(self._template).items()
        }

    def __iter__(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The rows of each block, and its tensors by their names."""
        for start in range(0, self._model.n_items, BLOCK_ITEMS):
            rows = slice(start, min(start + BLOCK_ITEMS, self._model.n_items))
            yield rows, _of_rows(_both(model_of_items(self._model, rows)))

    def margins(self, tensors: Mapping[str, Tensor]) -> Margins:
        """The margins with the tensors of all items, by their names."""
        double, single = _with_tensors(self._template, lambda name, own: tensors.get(name, own))
        return Margins(double, single)


def margins_of(model: PairwiseRanker) -> Margins:
    """The margins of a model; on a CPU, their tables are in `table_storage`.

    Raises OSError if a file cannot be written.
    """
    storage = table_storage()
    if not storage.in_files or model.device.type != "cpu" or model.n_items == 0:
        return Margins(model.tables())
    blocks = TableBlocks(model)
    tensors = {
        name: torch.from_numpy(storage.zeros(shape, _numpy_type(dtype)))
        for name, (dtype, shape) in blocks.shapes.items()
    }
    for rows, of_block in blocks:
        for name, value in of_block.items():
            tensors[name][rows] = value
    return blocks.margins(tensors)


def _numpy_type(dtype: torch.dtype) -> npt.DTypeLike:
    return np.float64 if dtype == torch.float64 else np.float32


def model_of_items(model: PairwiseRanker, rows: slice) -> PairwiseRanker:
    """The model with a part of its items, for `PairwiseRanker.tables` alone."""
    part = copy.copy(model)
    part._modules, part._parameters = dict(model._modules), dict(model._parameters)
    for name in model.item_tables:
        owner, _, leaf = name.rpartition(".")
        module: nn.Module = part
        if owner:
            module = copy.copy(model.get_submodule(owner))
            module._parameters = dict(module._parameters)
            part._modules[owner] = module
        table = module._parameters[leaf]
        if table is not None:
            module._parameters[leaf] = nn.Parameter(table.detach()[rows], requires_grad=False)
    return part


def _with_tensors(tree: Tree, change: Callable[[str, Tensor], Tensor], name: str = "") -> Tree:
    """A tree of dataclasses and tuples with the tensors that ``change`` gives by their names."""
    result: Any = tree
    if isinstance(tree, Tensor):
        result = change(name, tree)
    elif isinstance(tree, tuple):
        result = tuple(_with_tensors(e, change, f"{name}.{i}") for i, e in enumerate(tree))
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = {
            field.name: _with_tensors(getattr(tree, field.name), change, f"{name}.{field.name}")
            for field in fields(tree)
        }
        result = replace(tree, **parts)
    kept: Tree = result
    return kept


def _both(model: PairwiseRanker) -> tuple[PairTables, PairTables]:
    """A model's tables in float64 and in float32."""
    tables = model.tables()
    return tables.to(torch.float64), tables.to(torch.float32)


_ITEM_FIELDS = (".items", ".first", ".second")


def _of_rows(tables: tuple[PairTables, PairTables]) -> dict[str, Tensor]:
    """The tensors with a row for each item, by their names."""
    found: dict[str, Tensor] = {}

    def look(name: str, tensor: Tensor) -> Tensor:
        in_layers = ".layers." in name or name.endswith("user_bias")
        if not in_layers and name.endswith((*_ITEM_FIELDS, ".bias")):
            found[name] = tensor
        return tensor

    _with_tensors(tables, look)
    return found
