"""SQLite's file and its write-ahead log: checkpoints, copies, and a bug of older versions."""

from __future__ import annotations

import os
import re
import sqlite3
from bisect import bisect_left
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

MAX_COPIES = 2
_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


def version_warning() -> str | None:
    """What is to be known of this version of SQLite, if it has a bug."""
    version = sqlite3.sqlite_version_info
    # Fixed in 3.51.3, and in the last releases of two older series.
    if version >= (3, 51, 3) or (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51):
        return None
    return (
        "this version of SQLite has a rare bug that can damage the database when another program "
        "writes to it; use 3.51.3 or later"
    )


def log_pages(database: Path) -> int:
    """The number of pages in the write-ahead log since it was last begun anew.

    The file keeps its length when the log begins anew, so its size does not tell. Frames of the
    present log have the salt of the file's header, and come before those that are left of an older
    one (https://www.sqlite.org/fileformat2.html#walformat).
    """
    try:
        with Path(f"{database}-wal").open("rb", buffering=0) as file:
            header = file.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES:
                return 0
            frame_bytes = _FRAME_HEADER_BYTES + int.from_bytes(header[8:12], "big")
            frames = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // frame_bytes

            def is_old(frame: int) -> bool:
                salt = os.pread(file.fileno(), 8, _HEADER_BYTES + frame * frame_bytes + 8)
                return salt != header[16:24]

            return bisect_left(range(frames), True, key=is_old)
    except FileNotFoundError:
        return 0


def checkpoint(database: Path, busy_seconds: float) -> bool:
    """Copy the write-ahead log into the database while nobody can write. It blocks.

    Before 3.51.3 a commit of one connection during a checkpoint of another can damage the
    database. The write lock, held by a connection that writes nothing, keeps commits of all
    processes out, and with them other checkpoints by this function.

    Returns:
        Whether all of the log was copied; readers of older states prevent that.

    Raises:
        sqlite3.OperationalError: somebody else holds the lock for longer, or the disk fails.
    """
    with (
        closing(sqlite3.connect(database, timeout=busy_seconds, isolation_level=None)) as lock,
        closing(sqlite3.connect(database, isolation_level=None)) as connection,
    ):
        lock.execute("BEGIN IMMEDIATE")
        busy, pages, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        lock.execute("ROLLBACK")
    return not busy and pages == copied


def copy_of(database: Path, revision: str) -> Path:
    """Copy the database, with what is in its write-ahead log, and keep the newest copies only.

    Raises:
        OSError, sqlite3.Error: the copy cannot be written.
    """
    target = database.with_name(f"{database.name}.{revision}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    part = target.with_name(f"{target.name}.part")
    try:
        # It holds all that the database does: only its owner may read it.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)
        part.rename(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    name = re.compile(rf"{re.escape(database.name)}\.\d{{4}}-(\d{{8}}-\d{{6}}-\d{{6}})(\.part)?")
    found = [match for path in database.parent.iterdir() if (match := name.fullmatch(path.name))]
    whole = sorted((match for match in found if not match[2]), key=lambda match: match[1])
    # Whoever left a part has ended: two processes never migrate at a time.
    for match in [*whole[:-MAX_COPIES], *(match for match in found if match[2])]:
        database.with_name(match[0]).unlink()
    return target
