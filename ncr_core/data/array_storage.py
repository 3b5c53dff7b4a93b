"""The storage of large arrays: the memory of the process, or files mapped into memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

MIN_BYTES = 2**20  # of an array in a file; maps of less would be many, and save nothing
ZEROS = 2**24  # bytes written at once where a file system cannot reserve room


class ArrayStorage:
    """Makes arrays in the memory of the process."""

    in_files = False
    """Whether large arrays are in files."""

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array of zeros."""
        return np.zeros(shape, dtype)

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy of an array, contiguous by rows."""
        copied = self.zeros(array.shape, array.dtype)
        copied[...] = array
        return copied


IN_MEMORY = ArrayStorage()


class FileStorage(ArrayStorage):
    """Makes arrays in files, which the system can drop from memory and read again.

    The files have no names. They disappear with their arrays, also after a kill. Arrays of less
    than ``MIN_BYTES`` are in the memory of the process.
    """

    in_files = True

    def __init__(self, folder: Path) -> None:
        """Stores the folder of the files, which must exist by the first array."""
        self._folder = folder

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A new array of zeros. Raises OSError if the disk has too little room."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        if size < max(1, MIN_BYTES):
            return super().zeros(shape, kind)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            _reserve(file, size)
            content = mmap.mmap(file.fileno(), size)
        return np.frombuffer(content, kind).reshape(shape)


def _reserve(file: IO[bytes], size: int) -> None:
    """Gives a file its size and its room.

    A write to a map without room ends the process. File systems of a network may promise room that
    they do not have.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = bytes(ZEROS)
    for start in range(0, size, ZEROS):
        file.write(zeros[: size - start])
    file.flush()


_of_tables: ContextVar[ArrayStorage] = ContextVar("storage of tables", default=IN_MEMORY)


@contextmanager
def storing_tables(storage: ArrayStorage) -> Iterator[None]:
    """Lets this thread make tables of embeddings, and what is as large, in a storage.

    In files, a table may be larger than the memory of the process.
    """
    before = _of_tables.set(storage)
    try:
        yield
    finally:
        _of_tables.reset(before)


def table_storage() -> ArrayStorage:
    """The storage of tables, see `storing_tables`; by default the memory of the process."""
    return _of_tables.get()
