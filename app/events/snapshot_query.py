"""The queries of training, on one consistent state of the database and in chunks.

The queries bypass SQLAlchemy, which would take ten times the memory.
"""

from __future__ import annotations

import selectors
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import psycopg
import sqlalchemy as sa
from numpy.typing import NDArray
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url

from app.catalog.service import AVAILABLE_ITEMS, ITEM_COUNT
from app.core.settings import Settings
from app.events.event_weights import EventWeights
from app.events.tables import event_time, events
from app.events.throw_away import THROW_AWAY_LENGTH, THROW_AWAY_PREFIX

EVENT = np.dtype(
    [
        ("user_id", "i8"),
        ("item_id", "i8"),
        ("timestamp", "i8"),
        ("weight", "f4"),
        ("seq", "i8"),
    ]
)
"""An event: internal ids, microseconds since 1970, the weight before any decay, and the seq."""
CHUNK_EVENTS, CHUNK_IDS = 2**18, 2**15
# A row of PostgreSQL's binary COPY: the number of fields, then each one's length and bytes.
_COPY = np.dtype(
    [("fields", ">i2")]
    + [
        part
        for name in EVENT.names or ()
        for part in ((f"{name}_length", ">i4"), (name, EVENT[name].newbyteorder(">").str))
    ]
)
_COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_COPY_BYTES = 4_000_000
_SIZES = ("SELECT count(*) FROM events", "SELECT count(*) FROM users", ITEM_COUNT)
_USERS = (
    "SELECT id, external_id FROM users "  # noqa: S608 - a constant of the code
    f"WHERE substr(external_id, 1, {len(THROW_AWAY_PREFIX)}) <> '{THROW_AWAY_PREFIX}' "
    f"OR length(external_id) <> {THROW_AWAY_LENGTH}"
)
_MAX_SEQ = "SELECT value FROM counters WHERE name = 'event_seq'"
_PREFERENCES = (
    "SELECT user_id, winner_id, loser_id, timestamp, seq FROM preferences "
    "ORDER BY user_id, timestamp, seq"
)

Named = tuple[int, str]
"""An internal id and the client's id."""


class SnapshotQuery(Protocol):
    """One state of the database.

    Callers read an iterator to its end before they ask for the next one.
    """

    def sizes(self) -> tuple[int, int, int]:
        """The numbers of events, users and items, deleted items included."""

    def max_seq(self) -> int:
        """The highest seq of an event, a preference or a deletion."""

    def users(self) -> Iterator[Named]:
        """All users but throw-away users, in any order."""

    def items(self) -> Iterator[Named]:
        """All items but deleted ones, in any order."""

    def preferences(self) -> Iterator[tuple[int, ...]]:
        """Rows of user, winner, loser, timestamp and seq, in the order of user, time and seq."""

    def events(self) -> Iterator[NDArray[Any]]:
        """All events in any order, as arrays of `EVENT`."""


@contextmanager
def snapshot_query(settings: Settings) -> Iterator[SnapshotQuery]:
    """Opens a state of the database. The settings name the database and the event weights."""
    url = make_url(settings.effective_database_url)
    event_weights = EventWeights.from_settings(settings)
    if url.get_backend_name() == "sqlite":
        with _sqlite_query(str(url.database), event_weights) as query:
            yield query
    else:
        with _postgresql_query(url, event_weights) as query:
            yield query


def _statement(event_weights: EventWeights, dialect: sa.Dialect) -> tuple[str, dict[str, Any]]:
    """Return the query for all events, and its parameters.

    The database computes the weights, because the names of types would take more memory than all
    other columns.
    """
    weight = sa.cast(event_weights.expression(events.c.type, events.c.value), sa.REAL)
    columns = (events.c.user_id, events.c.item_id, event_time(), weight)
    compiled = sa.select(*columns, events.c.seq).compile(dialect=dialect)
    return str(compiled), dict(compiled.params)


class _SQLiteQuery:
    def __init__(self, connection: sqlite3.Connection, event_weights: EventWeights) -> None:
        self._connection, self._event_weights = connection, event_weights

    def sizes(self) -> tuple[int, int, int]:
        events, users, items = (
            int(self._connection.execute(query).fetchone()[0]) for query in _SIZES
        )
        return events, users, items

    def max_seq(self) -> int:
        return int(self._connection.execute(_MAX_SEQ).fetchone()[0])

    def users(self) -> Iterator[Named]:
        return self._connection.execute(_USERS)

    def items(self) -> Iterator[Named]:
        return self._connection.execute(AVAILABLE_ITEMS)

    def preferences(self) -> Iterator[tuple[int, ...]]:
        return self._connection.execute(_PREFERENCES)

    def events(self) -> Iterator[NDArray[Any]]:
        dialect = sqlite.dialect(paramstyle="named")
        rows = self._connection.execute(*_statement(self._event_weights, dialect))
        while len(chunk := np.fromiter(islice(rows, CHUNK_EVENTS), dtype=EVENT)):
            yield chunk


@contextmanager
def _sqlite_query(path: str, event_weights: EventWeights) -> Iterator[SnapshotQuery]:
    connection = sqlite3.connect(
        f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True, isolation_level=None
    )
    try:
        connection.execute("PRAGMA busy_timeout=10000")
        connection.execute("BEGIN")
        yield _SQLiteQuery(connection, event_weights)
    finally:
        connection.close()


class _PostgreSQLQuery:
    def __init__(
        self, connection: psycopg.Connection[tuple[Any, ...]], event_weights: EventWeights
    ) -> None:
        self._connection, self._event_weights = connection, event_weights

    def sizes(self) -> tuple[int, int, int]:
        events, users, items = (self._number(query) for query in _SIZES)
        return events, users, items

    def max_seq(self) -> int:
        return self._number(_MAX_SEQ)

    def users(self) -> Iterator[Named]:
        return self._rows(_USERS)

    def items(self) -> Iterator[Named]:
        return self._rows(AVAILABLE_ITEMS)

    def preferences(self) -> Iterator[tuple[int, ...]]:
        return self._rows(_PREFERENCES)

    def events(self) -> Iterator[NDArray[Any]]:
        dialect = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]
        statement, parameters = _statement(self._event_weights, dialect)
        copy = f"COPY ({statement}) TO STDOUT (FORMAT BINARY)"
        query = psycopg.ClientCursor(self._connection).mogrify(copy, parameters)
        yield from _copy_chunks(
            _copied(self._connection.pgconn, query.encode(self._connection.info.encoding))
        )

    def _number(self, query: str) -> int:
        row = self._connection.execute(query).fetchone()
        assert row is not None  # noqa: S101 - every such query has one row
        return int(row[0])

    def _rows(self, query: str) -> Iterator[Any]:
        with self._connection.cursor(name="rows") as cursor:  # a part of the rows at a time
            cursor.itersize = CHUNK_IDS
            cursor.execute(query)
            yield from cursor


@contextmanager
def _postgresql_query(url: URL, event_weights: EventWeights) -> Iterator[SnapshotQuery]:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    # Closed without a rollback: in the middle of a COPY it fails, and a log names the host.
    with closing(psycopg.connect(conninfo)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute("SELECT 1")  # begins the transaction
        yield _PostgreSQLQuery(connection, event_weights)


def _copied(connection: PGconn, query: bytes) -> Iterator[memoryview]:
    """Yield the rows of a COPY by libpq itself, in half of the time of `psycopg.Cursor.copy`.

    A row is valid until the next one. Raises psycopg.Error if the database ends the query.
    """
    result = connection.exec_(query)
    if result.status != ExecStatus.COPY_OUT:
        raise error_from_result(result)
    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        while True:
            length, row = connection.get_copy_data(1)
            if length > 0:
                yield row
            elif length == 0:  # nothing has arrived
                selector.select()
                connection.consume_input()
            else:
                break
    ends = list(iter(connection.get_result, None))  # all of them, or the connection stays busy
    for end in ends:
        if end.status != ExecStatus.COMMAND_OK:
            raise error_from_result(end)


def _copy_chunks(blocks: Iterable[memoryview]) -> Iterator[NDArray[Any]]:
    """Yield the rows of a binary COPY with fields of fixed length, a few MB at a time."""
    size = _COPY.itemsize
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
        if header_read and len(buffer) > _COPY_BYTES:
            whole = len(buffer) // size * size
            yield _unpack(bytes(buffer[:whole]))
            del buffer[:whole]
    # The stream ends with a record of -1 fields: two bytes.
    yield _unpack(bytes(buffer[: len(buffer) // size * size]))


def _unpack(data: bytes) -> NDArray[Any]:
    records = np.frombuffer(data, _COPY)
    rows = np.empty(len(records), EVENT)
    for name in EVENT.names or ():
        rows[name] = records[name]
    return rows
