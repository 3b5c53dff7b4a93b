"""Training snapshot: all events and preferences in one consistent state, and their matrix.

It is read past SQLAlchemy, which would take ten times the memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import psycopg
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url

from app.catalog.service import AVAILABLE_ITEMS, ITEM_COUNT
from app.core.settings import Settings
from app.core.tables import now_us
from app.events.event_weights import EventWeights
from app.events.profile import FeedbackPositions, latest_preferences, resolve_feedback
from app.events.tables import event_time, events
from ncr_core.data.interactions import FloatArray, IntArray, Interactions, UserFeedback
from ncr_core.errors import DataError

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
_SIZES = ("SELECT count(*) FROM events", "SELECT count(*) FROM users", ITEM_COUNT)
_USERS = "SELECT id, external_id FROM users"
_MAX_SEQ = "SELECT value FROM counters WHERE name = 'event_seq'"
_PREFERENCES = (
    "SELECT user_id, winner_id, loser_id, timestamp, seq FROM preferences "
    "ORDER BY user_id, timestamp, seq"
)


CheckSizes = Callable[[int, int, int], None]


class _Stored(NamedTuple):
    events: NDArray[Any]
    preferences: list[tuple[int, ...]]
    max_seq: int
    user_ids: dict[int, str]
    item_ids: dict[int, str]


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
    user_ids: dict[int, str]
    """Clients' ids of all users by internal ids."""
    item_ids: dict[int, str]
    """Of the items that may be recommended: all but deleted ones."""

    def __len__(self) -> int:
        return len(self.seq)

    def interactions(self) -> Interactions:
        """Builds the matrix of positive interactions, with the users' other feedback beside it.

        Of a user's events about an item the latest that is no mere view counts, see
        `resolve_feedback`. Users and items without a client's id are left out, and so are users
        without anything to learn from.

        Raises:
            DataError: Nothing is left to learn from.
        """
        if len(self) == 0:
            raise DataError(
                "there are no events to learn from: post some to /events, or import a file"
            )
        available = np.fromiter(self.item_ids, np.int64, len(self.item_ids))
        existing = np.fromiter(self.user_ids, np.int64, len(self.user_ids))
        mask = np.isin(self.item_id, available) & np.isin(self.user_id, existing)
        if not mask.any():
            raise DataError("no event is about an item that may be recommended")
        events = np.stack([self.user_id[mask], self.item_id[mask]], axis=1)
        feedback = _resolve_feedback(events, self.weight[mask])
        if len(feedback.liked) == 0:
            raise DataError("no event is positive by NCR_FEEDBACK: there is nothing to learn from")
        liked, disliked = events[feedback.liked], events[feedback.disliked]
        preferences = self.preferences
        usable = np.isin(preferences[:, 1:3], available).all(axis=1)
        rows = np.flatnonzero(usable & np.isin(preferences[:, 0], existing))
        if len(rows):
            rows = rows[latest_preferences(preferences[rows, :3])]
        pairs, pair_weights = preferences[rows, :3], self.preference_weight[rows]

        users = np.unique(np.concatenate([liked[:, 0], pairs[:, 0]]))
        items = np.unique(np.concatenate([liked[:, 1], disliked[:, 1], pairs[:, 1:].flatten()]))
        seen = _rows(events[feedback.only_seen], users, items)
        disliked = _rows(disliked, users, items)
        in_matrix = (disliked >= 0).all(axis=1)
        user_feedback = UserFeedback(
            seen[(seen >= 0).all(axis=1)],
            disliked[in_matrix],
            feedback.disliked_weights[in_matrix],
            _rows(pairs, users, items),
            pair_weights,
        )
        user_rows, item_rows = _rows(liked, users, items).T
        # A snapshot is ordered by user, time and seq already.
        return Interactions.from_arrays(
            user_rows,
            item_rows,
            user_ids=[self.user_ids[user] for user in users.tolist()],
            item_ids=[self.item_ids[item] for item in items.tolist()],
            weights=feedback.liked_weights if np.ptp(feedback.liked_weights) > 0 else None,
            feedback=user_feedback if len(user_feedback) else None,
            times=self.timestamp[mask][feedback.liked] / 1e6,
        )


def read_snapshot(
    settings: Settings, check_sizes: CheckSizes = lambda *sizes: None
) -> EventSnapshot:
    """Read the snapshot. It blocks: call it in a thread.

    Args:
        settings: name the database and weigh the events.
        check_sizes: called before the events are read with how many events, users and items there
            are; what it raises ends the reading.
    """
    url = make_url(settings.effective_database_url)
    event_weights = EventWeights.from_settings(settings)
    if url.get_backend_name() == "sqlite":
        stored = _read_sqlite(str(url.database), event_weights, check_sizes)
    else:
        stored = _read_postgresql(url, event_weights, check_sizes)
    rows, preference_rows, max_seq, user_ids, item_ids = stored
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
        user_ids=user_ids,
        item_ids=item_ids,
    )


def _statement(event_weights: EventWeights, dialect: sa.Dialect) -> tuple[str, dict[str, Any]]:
    """Return the query for all events, and its parameters.

    The database computes the weights: the names of types would take more memory than all else.
    """
    weight = sa.cast(event_weights.expression(events.c.type, events.c.value), sa.REAL)
    columns = (events.c.user_id, events.c.item_id, event_time(), weight)
    compiled = sa.select(*columns, events.c.seq).compile(dialect=dialect)
    return str(compiled), dict(compiled.params)


def _read_sqlite(path: str, event_weights: EventWeights, check_sizes: CheckSizes) -> _Stored:
    connection = sqlite3.connect(
        f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True, isolation_level=None
    )
    try:
        connection.execute("PRAGMA busy_timeout=10000")
        connection.execute("BEGIN")
        n_events, *others = (connection.execute(query).fetchone()[0] for query in _SIZES)
        check_sizes(n_events, *others)
        (max_seq,) = connection.execute(_MAX_SEQ).fetchone()
        user_ids: dict[int, str] = dict(connection.execute(_USERS))
        item_ids: dict[int, str] = dict(connection.execute(AVAILABLE_ITEMS))
        preferences = connection.execute(_PREFERENCES).fetchall()
        cursor = connection.execute(*_statement(event_weights, sqlite.dialect(paramstyle="named")))
        rows = np.fromiter(cursor, dtype=_DTYPE, count=n_events)
    finally:
        connection.close()
    return _Stored(rows, preferences, int(max_seq), user_ids, item_ids)


def _read_postgresql(url: URL, event_weights: EventWeights, check_sizes: CheckSizes) -> _Stored:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(conninfo) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        counts = (connection.execute(query).fetchone() or (0,) for query in _SIZES)
        check_sizes(*(count for (count,) in counts))
        row = connection.execute(_MAX_SEQ).fetchone()
        assert row is not None  # noqa: S101 - the migration inserts it
        user_ids: dict[int, str] = dict(connection.execute(_USERS).fetchall())
        item_ids: dict[int, str] = dict(connection.execute(AVAILABLE_ITEMS).fetchall())
        preferences = connection.execute(_PREFERENCES).fetchall()
        dialect = postgresql.psycopg.dialect()  # type: ignore[no-untyped-call]
        statement, parameters = _statement(event_weights, dialect)
        with (
            connection.cursor() as cursor,
            cursor.copy(f"COPY ({statement}) TO STDOUT (FORMAT BINARY)", parameters) as copy,
        ):
            chunks = list(_copy_chunks(bytes(block) for block in copy))
    packed = np.concatenate(chunks) if chunks else np.empty(0, _DTYPE)
    return _Stored(packed, preferences, int(row[0]), user_ids, item_ids)


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


def _resolve_feedback(events: IntArray, weights: FloatArray) -> FeedbackPositions:
    """What users like, dislike or have only seen, of (n, 2) users and items.

    Where all weights are the same, what is liked repeats as events do.
    """
    if weights[0] > 0 and (weights == weights[0]).all():
        none = np.zeros(0, dtype=np.int64)
        return FeedbackPositions(np.arange(len(events)), weights, none, weights[:0], none)
    items, columns = np.unique(events[:, 1], return_inverse=True)
    return resolve_feedback(events[:, 0] * len(items) + columns, weights)


def _rows(pairs: IntArray, users: IntArray, items: IntArray) -> IntArray:
    """Matrix rows of (n, 1 + k) internal ids, a user and k items; −1 for those not in it."""
    columns = [_positions(users, pairs[:, 0])]
    columns += [_positions(items, column) for column in pairs.T[1:]]
    return np.stack(columns, axis=1)


def _positions(ascending: IntArray, ids: IntArray) -> IntArray:
    """The position of each id among ascending ids; −1 for those that are not among them."""
    position = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.where(ascending[position] == ids, position, -1)
