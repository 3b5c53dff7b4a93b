"""Training snapshot: all events and preferences as arrays, in one consistent state.

It is read past SQLAlchemy, which would take ten times the memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psycopg
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL

from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.tables import event_time, events

_DTYPE = np.dtype(
    [
        ("user_id", "i8"),
        ("item_id", "i8"),
        ("timestamp", "i8"),
        ("weight", "f4"),
        ("seq", "i8"),
    ]
)
# A row of PostgreSQL's binary COPY: the number of fields, then each one's length and bytes.
_COPY_DTYPE = np.dtype(
    [("fields", ">i2")]
    + [
        part
        for name in _DTYPE.names or ()
        for part in ((f"{name}_length", ">i4"), (name, _DTYPE[name].newbyteorder(">").str))
    ]
)
_COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_MAX_SEQ = "SELECT value FROM counters WHERE name = 'event_seq'"
_PREFERENCES = (
    "SELECT user_id, winner_id, loser_id, timestamp, seq FROM preferences "
    "ORDER BY user_id, timestamp, seq"
)


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """Every event up to ``max_seq``, ordered by user, time and seq. Ids are internal."""

    user_id: NDArray[np.int64]
    """(n,) as every array of events."""
    item_id: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    """Microseconds since 1970, UTC."""
    weight: NDArray[np.float32]
    """The event's weight, see `EventWeights`, decayed to the latest event."""
    seq: NDArray[np.int64]
    preferences: NDArray[np.int64]
    """(P, 5) stated preferences in the same order: user, winner, loser, timestamp, seq."""
    preference_weight: NDArray[np.float32]
    """(P,) the decay of each, from 1 down."""
    max_seq: int

    def __len__(self) -> int:
        return len(self.seq)

    def users(self) -> set[int]:
        """Return the users with an event or a preference."""
        return {*self.user_id.tolist(), *self.preferences[:, 0].tolist()}

    def items(self) -> set[int]:
        """Return the items of events and preferences."""
        return {*self.item_id.tolist(), *self.preferences[:, 1:3].flatten().tolist()}


def read_snapshot(url: URL, event_weights: EventWeights) -> EventSnapshot:
    """Read the snapshot. It blocks: call it in a thread.

    Args:
        url: the database.
        event_weights: weighs the events.
    """
    if url.get_backend_name() == "sqlite":
        rows, preference_rows, max_seq = _read_sqlite(str(url.database), event_weights)
    else:
        rows, preference_rows, max_seq = _read_postgresql(url, event_weights)
    # Sorted here: the database would spill a sort of this size to disk.
    order = np.lexsort((rows["seq"], rows["timestamp"], rows["user_id"]))
    preferences = np.array(preference_rows, dtype=np.int64).reshape(-1, 5)
    timestamp, weight = rows["timestamp"][order], rows["weight"][order]
    # Not after the present: an event in the future would make all others old.
    latest = max((int(t.max()) for t in (timestamp, preferences[:, 3]) if len(t)), default=0)
    now = min(now_us(), latest)
    if event_weights.half_life_days is not None:
        weight *= event_weights.decay(timestamp, now)
    return EventSnapshot(
        user_id=rows["user_id"][order],
        item_id=rows["item_id"][order],
        timestamp=timestamp,
        weight=weight,
        seq=rows["seq"][order],
        preferences=preferences,
        preference_weight=event_weights.decay(preferences[:, 3], now),
        max_seq=max_seq,
    )


def _statement(event_weights: EventWeights, dialect: sa.Dialect) -> tuple[str, dict[str, Any]]:
    """Return the query for all events, and its parameters.

    The database computes the weights: the names of types would take more memory than all else.
    """
    weight = sa.cast(event_weights.expression(events.c.type, events.c.value), sa.REAL)
    columns = (events.c.user_id, events.c.item_id, event_time(), weight)
    compiled = sa.select(*columns, events.c.seq).compile(dialect=dialect)
    return str(compiled), dict(compiled.params)


def _read_sqlite(
    path: str, event_weights: EventWeights
) -> tuple[NDArray[Any], list[tuple[int, ...]], int]:
    connection = sqlite3.connect(
        f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True, isolation_level=None
    )
    try:
        connection.execute("PRAGMA busy_timeout=10000")
        connection.execute("BEGIN")
        (max_seq,) = connection.execute(_MAX_SEQ).fetchone()
        (count,) = connection.execute("SELECT count(*) FROM events").fetchone()
        preferences = connection.execute(_PREFERENCES).fetchall()
        cursor = connection.execute(*_statement(event_weights, sqlite.dialect(paramstyle="named")))
        rows = np.fromiter(cursor, dtype=_DTYPE, count=count)
    finally:
        connection.close()
    return rows, preferences, int(max_seq)


def _read_postgresql(
    url: URL, event_weights: EventWeights
) -> tuple[NDArray[Any], list[tuple[int, ...]], int]:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(conninfo) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        row = connection.execute(_MAX_SEQ).fetchone()
        assert row is not None  # noqa: S101 - the migration inserts it
        preferences = connection.execute(_PREFERENCES).fetchall()
        dialect = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]
        statement, parameters = _statement(event_weights, dialect)
        with (
            connection.cursor() as cursor,
            cursor.copy(f"COPY ({statement}) TO STDOUT (FORMAT BINARY)", parameters) as copy,
        ):
            chunks = list(_copy_chunks(bytes(block) for block in copy))
    packed = np.concatenate(chunks) if chunks else np.empty(0, _DTYPE)
    return packed, preferences, int(row[0])


def _copy_chunks(blocks: Iterator[bytes]) -> Iterator[NDArray[Any]]:
    """Yield the rows of a binary COPY with fields of fixed length, a few MB at a time."""
    size = _COPY_DTYPE.itemsize
    buffer = bytearray()
    header_read = False
    for block in blocks:
        buffer += block
        if not header_read and len(buffer) >= 19:
            if not buffer.startswith(_COPY_SIGNATURE):
                raise RuntimeError("PostgreSQL answered COPY in an unknown format")
            extension = int.from_bytes(buffer[15:19], "big")
            del buffer[: 19 + extension]
            header_read = True
        if header_read and len(buffer) > 4_000_000:
            whole = len(buffer) // size * size
            yield _unpack(bytes(buffer[:whole]))
            del buffer[:whole]
    # The stream ends with a record of -1 fields: two bytes.
    yield _unpack(bytes(buffer[: len(buffer) // size * size]))


def _unpack(data: bytes) -> NDArray[Any]:
    records = np.frombuffer(data, _COPY_DTYPE)
    rows = np.empty(len(records), _DTYPE)
    for name in _DTYPE.names or ():
        rows[name] = records[name]
    return rows
