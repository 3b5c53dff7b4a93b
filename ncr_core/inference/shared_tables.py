"""The ranking tables in a file that all servers of a machine map into memory.

The tables are computed from a model's item tables, some rows at a time. The file has a copy in
float64 and a copy in float32, three times the size of the item tables. Each server has the other,
small parameters of the model in its own memory. A file is whole or absent, and its header states
its length. The file is a cache, and has no checksum.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from ncr_core.atomic_files import atomic_file
from ncr_core.errors import CheckpointError
from ncr_core.models.base import PairwiseRanker
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.table_blocks import TableBlocks
from ncr_core.tensor_files import TensorLayout, map_tensors

FORMAT = "1"
KEPT_SECONDS = 86_400.0  # of files that no server has begun to use since


class SharedTables:
    """A folder of tables, beside the local copies of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def margins(self, model: PairwiseRanker, key: str) -> Margins:
        """The margins of a model on a CPU, from tables that are mapped into memory.

        Two servers that start at once may both compute the tables; one file is kept. A damaged file
        is replaced and never removed: another server may have replaced it by a whole one meanwhile.

        Args:
            model: The model.
            key: The key of the file: the SHA-256 of the checkpoint's manifest.

        Raises:
            OSError: The file cannot be written.
        """
        path = self.path(key, "tables.safetensors")
        tables = TableBlocks(model)
        try:
            mapped = self._mapped(path, tables)
        except CheckpointError:  # there is none, or it is cut off
            self._write(path, tables, replace=path.exists())
            mapped = self._mapped(path, tables)
        with contextlib.suppress(OSError):  # a folder that others write
            os.utime(path)
        return tables.margins(mapped)

    def path(self, key: str, kind: str) -> Path:
        """The file of a kind for a model."""
        # Other versions of torch may round differently.
        return self._folder / f"{key[:32]}-{FORMAT}-torch{torch.__version__}.{kind}"

    def _mapped(self, path: Path, tables: TableBlocks) -> dict[str, Tensor]:
        tensors = map_tensors(path)
        if {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} != tables.shapes:
            raise CheckpointError(f"{path.name} holds other tables")
        return tensors

    def _write(self, path: Path, tables: TableBlocks, *, replace: bool) -> None:
        layout = TensorLayout(tables.shapes)
        with contextlib.suppress(FileExistsError), atomic_file(path, replace=replace) as file:
            layout.begin(file)
            for rows, tensors in tables:
                for name, values in tensors.items():
                    layout.write(file, name, values, rows.start)
        self._remove_old(path)

    def _remove_old(self, new: Path) -> None:
        """Removes files that no server has opened for a day; servers that use them keep them."""
        for other in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if other != new and other.stat().st_mtime < time.time() - KEPT_SECONDS:
                    other.unlink()
