"""New files of backups and exports, which replace nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.transfer.archive import TransferError
from ncr_core.atomic_files import PRIVATE, atomic_file


def refuse_existing(path: Path) -> None:
    """Raises TransferError if the name is taken."""
    if os.path.lexists(path):
        raise TransferError(f"{path} exists already; nothing is overwritten")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write atomically, for its owner alone. Raises TransferError if it exists."""
    try:
        with atomic_file(path, mode=PRIVATE) as file:
            yield file
    except FileExistsError:
        raise TransferError(f"{path} exists already; nothing is overwritten") from None
