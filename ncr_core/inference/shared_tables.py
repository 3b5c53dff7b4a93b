"""The ranking tables in a file that all servers of a machine map into memory.

The tables are computed from a model's item tables, some rows at a time. The file has a copy in
float64 and a copy in float32, three times the size of the item tables. Each server has the other,
small parameters of the model in its own memory. A file is whole or absent, and its header states
its length. The file is a cache, and has no checksum.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ncr_core.atomic_files import atomic_file
from ncr_core.errors import CheckpointError
from ncr_core.models.base import PairwiseRanker
from ncr_core.models.scoring_tables import PairTables
from ncr_core.ranking.margins import Margins
from ncr_core.tensor_files import TensorLayout, map_tensors

FORMAT = "1"
BLOCK_ITEMS = 2**16  # computed at a time
KEPT_SECONDS = 86_400.0  # of files that no server has begun to use since

Tree = TypeVar("Tree")


class SharedTables:
    """A folder of tables, beside the local copies of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def margins(self, model: PairwiseRanker, key: str) -> Margins:
        """The margins of a model on a CPU, from tables that are mapped into memory.

        Two servers that start at once may both compute the tables; one file is kept.

        Args:
            model: The model.
            key: The key of the file: the SHA-256 of the checkpoint's manifest.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.path(key, "tables.safetensors")
        template = _both(_of_items(model, slice(0, 1)))
        try:
            mapped = self._mapped(path, template, model.n_items)
        except CheckpointError:  # there is none, or it is cut off
            path.unlink(missing_ok=True)
            self._write(path, model, template)
            mapped = self._mapped(path, template, model.n_items)
        with contextlib.suppress(OSError):  # a folder that others write
            os.utime(path)
        double, single = with_tensors(template, lambda name, own: mapped.get(name, own))
        return Margins(double, single)

    def path(self, key: str, kind: str) -> Path:
        """The file of a kind for a model."""
        # Other versions of torch may round differently.
        return self._folder / f"{key[:32]}-{FORMAT}-torch{torch.__version__}.{kind}"

    def _mapped(
        self, path: Path, template: tuple[PairTables, PairTables], n_items: int
    ) -> dict[str, Tensor]:
        tensors = map_tensors(path)
        expected = {
            name: (tensor.dtype, (n_items, *tensor.shape[1:]))
            for name, tensor in _of_rows(template).items()
        }
        if {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} != expected:
            raise CheckpointError(f"{path.name} holds other tables")
        return tensors

    def _write(
        self, path: Path, model: PairwiseRanker, template: tuple[PairTables, PairTables]
    ) -> None:
        layout = TensorLayout(
            {
                name: (tensor.dtype, (model.n_items, *tensor.shape[1:]))
                for name, tensor in _of_rows(template).items()
            }
        )
        with contextlib.suppress(FileExistsError), atomic_file(path) as file:
            layout.begin(file)
            for start in range(0, model.n_items, BLOCK_ITEMS):
                stop = min(start + BLOCK_ITEMS, model.n_items)
                for name, rows in _of_rows(_both(_of_items(model, slice(start, stop)))).items():
                    layout.write(file, name, rows, start)
        self._remove_old(path)

    def _remove_old(self, new: Path) -> None:
        """Removes files that no server has opened for a day; servers that use them keep them."""
        for other in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if other != new and other.stat().st_mtime < time.time() - KEPT_SECONDS:
                    other.unlink()


def with_tensors(tree: Tree, change: Callable[[str, Tensor], Tensor], name: str = "") -> Tree:
    """A tree of dataclasses and tuples with the tensors that ``change`` gives by their names."""
    result: Any = tree
    if isinstance(tree, Tensor):
        result = change(name, tree)
    elif isinstance(tree, tuple):
        result = tuple(with_tensors(e, change, f"{name}.{i}") for i, e in enumerate(tree))
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = {
            field.name: with_tensors(getattr(tree, field.name), change, f"{name}.{field.name}")
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

    with_tensors(tables, look)
    return found


def _of_items(model: PairwiseRanker, rows: slice) -> PairwiseRanker:
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
