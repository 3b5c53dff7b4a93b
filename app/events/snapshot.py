"""All events as arrays, for training: past SQLAlchemy, which would take ten times the memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psycopg
from numpy.typing import NDArray
from sqlalchemy.engine import URL

_COLUMNS = ("user_id", "item_id", "timestamp", "value", "seq")
_DTYPE = np.dtype(
    [
        ("user_id", "i8"),
        ("item_id", "i8"),
        ("timestamp", "i8"),
        ("value", "f8"),
        ("seq", "i8"),
    ]
)
# A row of PostgreSQL's binary COPY: the number of fields, then each one's length and bytes.
_COPY_DTYPE = np.dtype(
    [("fields", ">i2")]
    + [
        part
        for name in _COLUMNS
        for part in ((f"{name}_length", ">i4"), (name, ">f8" if name == "value" else ">i8"))
    ]
)
_COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Every event up to `max_seq`, ordered by user, time and seq. Ids are internal."""

    user_id: NDArray[np.int64]
    item_id: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    """Microseconds since 1970, UTC."""
    value: NDArray[np.float64]
    """NaN where the event has none."""
    seq: NDArray[np.int64]
    max_seq: int

    def __len__(self) -> int:
        return len(self.seq)

    def save(self, path: Path) -> None:
        """Write it as `.npz`."""
        with path.open("wb") as file:
            np.savez(file, **{part.name: getattr(self, part.name) for part in fields(self)})

    @classmethod
    def load(cls, path: Path) -> EventSnapshot:
        """Read what `save` wrote. Never unpickles."""
        with np.load(path, allow_pickle=False) as file:
            return cls(
                user_id=file["user_id"],
                item_id=file["item_id"],
                timestamp=file["timestamp"],
                value=file["value"],
                seq=file["seq"],
                max_seq=int(file["max_seq"]),
            )


def read_snapshot(url: URL) -> EventSnapshot:
    """Read the events in one consistent state of the database. Blocks: call it in a thread."""
    if url.get_backend_name() == "sqlite":
        rows, max_seq = _read_sqlite(str(url.database))
    else:
        rows, max_seq = _read_postgresql(url)
    # Sorted here: the database would spill a sort of this size to disk.
    order = np.lexsort((rows["seq"], rows["timestamp"], rows["user_id"]))
    return EventSnapshot(
        user_id=rows["user_id"][order],
        item_id=rows["item_id"][order],
        timestamp=rows["timestamp"][order],
        value=rows["value"][order],
        seq=rows["seq"][order],
        max_seq=max_seq,
    )


def _read_sqlite(path: str) -> tuple[NDArray[Any], int]:
    connection = sqlite3.connect(
        f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True, isolation_level=None
    )
    try:
        connection.execute("PRAGMA busy_timeout=10000")
        connection.execute("BEGIN")
        (max_seq,) = connection.execute(
            "SELECT value FROM counters WHERE name = 'event_seq'"
        ).fetchone()
        (count,) = connection.execute("SELECT count(*) FROM events").fetchone()
        cursor = connection.execute(
            # A number larger than any float is none in SQL; NaN has no literal at all.
            "SELECT user_id, item_id, timestamp, ifnull(value, 9e999), seq FROM events"
        )
        rows = np.fromiter(cursor, dtype=_DTYPE, count=count)
    finally:
        connection.close()
    rows["value"][np.isinf(rows["value"])] = np.nan
    return rows, int(max_seq)


def _read_postgresql(url: URL) -> tuple[NDArray[Any], int]:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(conninfo) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        counter = connection.execute("SELECT value FROM counters WHERE name = 'event_seq'")
        row = counter.fetchone()
        assert row is not None  # noqa: S101 - the migration inserts it
        with (
            connection.cursor() as cursor,
            cursor.copy(
                "COPY (SELECT user_id, item_id, timestamp, "
                "coalesce(value, 'NaN'::double precision), seq FROM events) "
                "TO STDOUT (FORMAT BINARY)"
            ) as copy,
        ):
            chunks = list(_copy_chunks(bytes(block) for block in copy))
    packed = np.concatenate(chunks) if chunks else np.empty(0, _DTYPE)
    return packed, int(row[0])


def _copy_chunks(blocks: Iterator[bytes]) -> Iterator[NDArray[Any]]:
    """The records of a binary COPY in which every field has 8 bytes, a few MB at a time."""
    size = _COPY_DTYPE.itemsize
    buffer = bytearray()
    header_read = False
    for block in blocks:
        buffer += block
        if not header_read and len(buffer) >= 19:
            if not buffer.startswith(_COPY_SIGNATURE):
                raise RuntimeError("PostgreSQL answered COPY in a format that is not known")
            extension = int.from_bytes(buffer[15:19], "big")
            del buffer[: 19 + extension]
            header_read = True
        if header_read and len(buffer) > 4_000_000:
            whole = len(buffer) // size * size
            yield _unpack(bytes(buffer[:whole]))
            del buffer[:whole]
    # What ends the stream is a record of -1 fields: two bytes.
    yield _unpack(bytes(buffer[: len(buffer) // size * size]))


def _unpack(data: bytes) -> NDArray[Any]:
    records = np.frombuffer(data, _COPY_DTYPE)
    rows = np.empty(len(records), _DTYPE)
    for name in _COLUMNS:
        rows[name] = records[name]
    return rows
