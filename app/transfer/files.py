"""Files that appear under their names when they are whole, and never in the place of others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.transfer.archive import TransferError


def refuse_existing(path: Path) -> None:
    """Raises TransferError where something of that name is there."""
    if os.path.lexists(path):
        raise TransferError(f"{path} exists already; nothing is overwritten")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, readable by its owner alone; after an error nothing is left of it.

    Makes the folders above it. Raises TransferError where the name is taken.
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}-", dir=path.parent)
    staging = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        refuse_existing(path)
        staging.rename(path)
        sync_folder(path.parent)
    finally:
        staging.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename within the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
