"""Profile cache: users' profiles in memory, read many at once and dropped on a user's change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
from numpy.typing import NDArray
from sqlalchemy.exc import SQLAlchemyError

from app.core.bulk import each_of
from app.core.cache import ByteCache, SingleFlight
from app.core.database import Database
from app.core.logging import get_logger
from app.core.tables import CATALOG_SEQ, EVENT_SEQ, USER_SEQ, current_value
from app.events.event_weights import EventWeights
from app.events.profile import Profile
from app.events.tables import event_time, events, preferences, retractions, users

log = get_logger(__name__)

MAX_STALENESS_SECONDS = 0.05
MIN_HINTED_INTERVAL_SECONDS = 0.005  # between two reads of the counters, however many hints come
MAX_DELTA_EVENTS = 5_000
"""The largest number of new seqs for which a look finds the users who changed. With more new seqs,
the cache drops all profiles."""
MAX_RECENT_EVENTS = 10_000
"""The number of a user's latest events that a profile has in full. Of older events, a profile has
the first, and one for each item."""
PROFILE_BYTES = 800  # of a profile without its arrays
MAX_USERS_READ = 32  # by one query
MAX_QUERIES = 2  # at a time: while they run, requests collect for the next
MAX_SEQS_READ = 2_000  # users whose last seqs one query reads
FOLLOW_SECONDS = 10.0  # between two reads of the same users' last seqs

_NO_IDS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_WEIGHTS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
_NO_PAIRS: NDArray[np.int64] = np.zeros((0, 4), dtype=np.int64)

_Row = tuple[Any, ...]

_SINCE = sa.bindparam("seq", type_=sa.BigInteger)
_UNTIL = sa.bindparam("until", type_=sa.BigInteger)
_COUNTERS = sa.select(current_value(EVENT_SEQ), current_value(CATALOG_SEQ), current_value(USER_SEQ))
_USERS_SINCE = sa.union(
    *(
        sa.select(users.c.external_id)
        .join(table, table.c.user_id == users.c.id)
        .where(table.c.seq > _SINCE)
        for table in (events, preferences)
    )
)
_DESCRIBED_SINCE = sa.select(users.c.external_id).where(users.c.attributes_seq > _SINCE)
_RETRACTED_SINCE = (
    sa.select(users.c.external_id, retractions.c.user_id)
    .select_from(retractions.outerjoin(users, users.c.id == retractions.c.user_id))
    .where(retractions.c.seq > _SINCE)
)
_ROWS_SINCE = sa.select(
    *(
        sa.select(sa.func.count())
        .select_from(table)
        .where(table.c.seq > _SINCE, table.c.seq <= _UNTIL)
        .scalar_subquery()
        for table in (events, retractions, preferences)
    )
)


class RowReader:
    """Reads the rows of several users with one query.

    Requests that arrive while ``MAX_QUERIES`` queries run wait for the next query. A query begins
    after all requests that it answers.

    Args:
        database: the database of the rows.
        statement: a query with the parameter ``users``, a JSON list of clients' ids. The query
            gives a row for each user, with the client's id first.
        parameters: the other parameters of the query.
    """

    def __init__(
        self, database: Database, statement: sa.Select[Any], parameters: Mapping[str, Any]
    ) -> None:
        self._database = database
        self._statement = statement
        self._parameters = parameters
        self._waiting: dict[str, asyncio.Future[_Row]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def get(self, user: str) -> _Row:
        """The row of a user, without the client's id. Raises the errors of the query."""
        future = self._waiting.get(user)
        if future is None:
            future = self._waiting[user] = asyncio.get_running_loop().create_future()
            if len(self._running) < MAX_QUERIES:
                task = asyncio.create_task(self._run())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        return await asyncio.shield(future)

    async def _run(self) -> None:
        while self._waiting:
            asked = list(islice(self._waiting, MAX_USERS_READ))
            futures = {user: self._waiting.pop(user) for user in asked}
            parameters = {"users": orjson.dumps(asked).decode(), **self._parameters}
            try:
                rows = await self._database.fetch(self._statement, parameters)
                of_user = {user: tuple(row) for user, *row in rows}
                for user, future in futures.items():
                    future.set_result(of_user[user])
            except asyncio.CancelledError:
                for future in [*futures.values(), *self._waiting.values()]:
                    future.cancel()
                self._waiting.clear()
                raise
            except Exception as error:
                for future in futures.values():
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # its caller may have gone: nothing is to be logged


class ProfileCache:
    """Users' profiles in memory, at most ``MAX_STALENESS_SECONDS`` behind other processes.

    Commits of this process show at once, because `Database` counts its own transactions. Commits of
    other processes show in the counters of the database. A request reads the counters if the last
    look is older than ``MAX_STALENESS_SECONDS``, or sooner after a hint. A look at the counters
    drops only the profiles of the users who changed.
    """

    def __init__(self, database: Database, event_weights: EventWeights, max_bytes: int) -> None:
        self._database = database
        self._event_weights = event_weights
        self._older = older_events_statement(database.dialect, event_weights)
        self._cache: ByteCache[str, Profile] = ByteCache(max_bytes)
        # What a user has changed since its read began may be missing: it is not kept.
        self._reads: SingleFlight[str, Profile] = SingleFlight(self._put)
        statement = profile_statement(database.dialect, event_weights)
        self._rows = RowReader(database, statement, {"limit": MAX_RECENT_EVENTS})
        self._looks: SingleFlight[None, None] = SingleFlight()
        self._seqs = last_seqs_statement(database.dialect)
        self._followed: Mapping[str, int] | None = None
        self._followed_at = -float("inf")
        self._last_seqs: dict[str, tuple[int, int]] = {}  # internal id and last seq
        self._dropped: set[str | int] | None = None  # users, while last seqs are read
        self._event_seq = self._catalog_seq = -1
        self._user_seq: int | None = None
        self._commits_seen = -1
        self._last_look = self._last_hint = -float("inf")

    def hint(self) -> None:
        """Note a change by another process. The next request reads the counters."""
        self._last_hint = time.monotonic()

    @property
    def cache(self) -> ByteCache[str, Profile]:
        """The cached profiles by the client's user id."""
        return self._cache

    async def get(self, user: str, min_seq: int | None = None) -> Profile:
        """Return the user's profile, which is empty for an unknown user.

        Args:
            user: the client's id.
            min_seq: the lowest ``event_seq`` of the profile, unless the service has not reached
                this seq yet.
        """
        event_seq, catalog_seq = await self.catch_up(min_seq)
        profile = self._cache.get(user)
        if profile is None:
            # Another request may have started this read before those counters were read. If the
            # user had changed in between, the read would have been dropped.
            profile = await self._reads.run(user, lambda: self.read(user))
            if profile.event_seq < event_seq or profile.catalog_seq < catalog_seq:
                return profile.at(event_seq, catalog_seq)
            return profile
        if profile.event_seq < event_seq or profile.catalog_seq < catalog_seq:
            # The user has not changed up to here.
            profile = profile.at(event_seq, catalog_seq)
            self._put(user, profile)
        return profile

    async def catch_up(self, min_seq: int | None = None) -> tuple[int, int]:
        """Take in the committed changes, and return the event seq and the catalogue's number.

        The event seq is at least ``min_seq``, unless the service has not reached it yet.
        """
        now = time.monotonic()
        since = now - MAX_STALENESS_SECONDS
        if self._last_hint > since and now - self._last_look > MIN_HINTED_INTERVAL_SECONDS:
            since = self._last_hint
        commits = self._database.commits
        while (
            self._commits_seen < commits
            or self._last_look < since
            or (min_seq is not None and self._event_seq < min_seq and self._last_look < now)
        ):
            await self._looks.run(None, self._look)
        return self._event_seq, self._catalog_seq

    def last_seq(self, user: str) -> int | None:
        """The last seq of a user as of the latest `catch_up`; None if unknown."""
        known = self._last_seqs.get(user)
        return None if known is None else known[1]

    async def follow(self, users: Mapping[str, int]) -> None:
        """Keep the last seqs of these users, and of no other users, without their profiles.

        Frequent calls are cheap. A call reads the seqs only for another mapping of users, or after
        the cache has dropped all profiles. After an error, some seqs stay unknown until the next
        call.
        """
        now = time.monotonic()
        is_known = self._last_seqs or not users or now < self._followed_at
        if users is self._followed and is_known:
            return
        self._followed, self._followed_at = None, now + FOLLOW_SECONDS
        for user in self._last_seqs.keys() - users.keys():
            del self._last_seqs[user]
        names = list(users)
        try:
            await self.catch_up()
            for start in range(0, len(names), MAX_SEQS_READ):
                dropped = self._dropped = set()
                part = orjson.dumps(names[start : start + MAX_SEQS_READ]).decode()
                rows = await self._database.fetch(self._seqs, {"users": part})
                if self._dropped is not dropped:
                    break  # everybody was dropped meanwhile
                # A look that ended meanwhile may know of changes that these rows are without.
                self._last_seqs |= {
                    user: (user_id, seq)
                    for user, user_id, seq in rows
                    if user not in dropped and user_id not in dropped
                }
            self._followed = users
        except SQLAlchemyError as error:
            log.warning("the changes of users cannot be read", error=str(error).partition("\n")[0])
        finally:
            self._dropped = None

    async def read(self, user: str) -> Profile:
        """Read the user's profile from the database, in one query for all waiting users.

        A user with at least ``MAX_RECENT_EVENTS`` events takes a second query.
        """
        limit = MAX_RECENT_EVENTS
        row = await self._rows.get(user)
        event_seq, catalog_seq, user_id, last_seq, attributes, attributes_seq, *packed = row
        packed_events, packed_preferences = packed
        now = event_seq, catalog_seq, self._event_weights
        if user_id is None:
            return Profile(None, 0, _NO_IDS, _NO_IDS, _NO_WEIGHTS, _NO_IDS, _NO_PAIRS, *now)
        columns = [column[::-1] for column in orjson.loads(packed_events)]
        if len(columns[0]) == limit:
            more = {"user_id": user_id, "seq": columns[1][0]}
            older = orjson.loads((await self._database.fetch(self._older, more))[0][0])
            columns = [old + new for old, new in zip(older, columns, strict=True)]
        items, seqs, timestamps, weights = columns
        pairs = orjson.loads(packed_preferences)
        return Profile(
            user_id,
            last_seq,
            np.array(items, dtype=np.int64),
            np.array(seqs, dtype=np.int64),
            np.array(weights, dtype=np.float32),
            np.array(timestamps, dtype=np.int64),
            np.array(pairs, dtype=np.int64).T if pairs[0] else _NO_PAIRS,
            *now,
            attributes,
            attributes_seq or 0,
        )

    def _put(self, user: str, profile: Profile) -> None:
        self._cache.put(user, profile, PROFILE_BYTES + profile.nbytes)

    async def _look(self) -> None:
        """Read the counters and drop the profiles of the users who changed."""
        commits, began = self._database.commits, time.monotonic()
        event_seq, catalog_seq, user_seq = (await self._database.fetch(_COUNTERS))[0]
        if self._user_seq is not None and user_seq > self._user_seq:
            await self._drop_described(self._user_seq)
        self._user_seq = user_seq
        if event_seq > self._event_seq:
            await self._drop_changed(event_seq)
        self._event_seq, self._catalog_seq = event_seq, catalog_seq
        self._commits_seen, self._last_look = commits, began

    async def _drop_described(self, since: int) -> None:
        """Drop the profiles of users whose attributes changed.

        The last seqs stay, because the events did not change.
        """
        rows = await self._database.fetch(_DESCRIBED_SINCE, {"seq": since})
        for (user,) in rows:
            self._cache.pop(user)
            self._reads.forget(user)

    async def _drop_changed(self, event_seq: int) -> None:
        since = {"seq": self._event_seq}
        if event_seq - self._event_seq > MAX_DELTA_EVENTS or await self._has_gap(event_seq):
            self._cache.clear()
            self._last_seqs.clear()
            self._dropped = None
            self._reads.forget_all()
            return
        changed = [user for (user,) in await self._database.fetch(_USERS_SINCE, since)]
        retracted = await self._database.fetch(_RETRACTED_SINCE, since)
        erased = {user_id for user, user_id in retracted if user is None}
        if erased:  # their names are gone
            self._reads.forget_all()
            changed += [user for user, p in self._cache.items() if p.user_id in erased]
            changed += [user for user, (user_id, _) in self._last_seqs.items() if user_id in erased]
        changed += [user for user, _ in retracted if user is not None]
        for user in changed:
            self._cache.pop(user)
            self._last_seqs.pop(user, None)
            self._reads.forget(user)
        if self._dropped is not None:
            self._dropped.update(changed, erased)

    async def _has_gap(self, event_seq: int) -> bool:
        """Return whether a new seq belongs to no event, preference or retraction.

        Versions of the service before the table of retractions deleted events without a trace. An
        event that was added and deleted since the last look leaves a gap, too.
        """
        span = {"seq": self._event_seq, "until": event_seq}  # later rows would hide a gap
        counts = (await self._database.fetch(_ROWS_SINCE, span))[0]
        return sum(map(int, counts)) < event_seq - self._event_seq


def profile_statement(dialect: str, event_weights: EventWeights) -> sa.Select[Any]:
    """Return the query for profiles: a row for each user, without an internal id for unknown users.

    Events and preferences come as JSON, which is faster to parse than the driver's arrays. The
    events are the latest ``limit`` events of the user, newest first.
    """
    columns = (
        _columns_as_json(
            dialect,
            _events(event_weights)
            .where(events.c.user_id == users.c.id)
            .order_by(events.c.seq.desc())
            .limit(sa.bindparam("limit", type_=sa.BigInteger))
            .correlate(users),
        ),
        _columns_as_json(
            dialect,
            sa.select(
                preferences.c.winner_id,
                preferences.c.loser_id,
                preferences.c.seq,
                preferences.c.timestamp,
            )
            .where(preferences.c.user_id == users.c.id)
            .order_by(preferences.c.seq)
            .correlate(users),
        ),
    )
    counters = sa.select(
        current_value(EVENT_SEQ).label("event_seq"), current_value(CATALOG_SEQ).label("catalog_seq")
    ).subquery()
    asked = each_of(sa.bindparam("users", type_=sa.Text), dialect)
    described = sa.cast(users.c.attributes, sa.Text), users.c.attributes_seq
    of_user = users.c.id, users.c.last_seq, *described, *columns
    return sa.select(asked.c.value, counters, *of_user).select_from(
        asked.join(counters, sa.true()).outerjoin(users, users.c.external_id == asked.c.value)
    )


def last_seqs_statement(dialect: str) -> sa.Select[Any]:
    """Return the query for the ids and last seqs of the users who exist."""
    asked = each_of(sa.bindparam("users", type_=sa.Text), dialect)
    return sa.select(users.c.external_id, users.c.id, users.c.last_seq).select_from(
        asked.join(users, users.c.external_id == asked.c.value)
    )


def older_events_statement(dialect: str, event_weights: EventWeights) -> sa.Select[Any]:
    """Return the query for the events before a seq that decide about a user's items.

    For each item, the query gives the latest event with a non-zero weight, or else the latest
    event. The query also gives the user's first event, which tells since when the user is known.
    """
    rows = (
        _events(event_weights)
        .where(
            events.c.user_id == sa.bindparam("user_id", type_=sa.BigInteger), events.c.seq < _SINCE
        )
        .subquery()
    )
    order = (sa.case((rows.c.weight != 0, 0), else_=1), rows.c.timestamp.desc(), rows.c.seq.desc())
    place = sa.func.row_number().over(partition_by=rows.c.item_id, order_by=order).label("place")
    number = sa.func.row_number().over(order_by=rows.c.seq).label("number")
    placed = sa.select(rows, place, number).subquery()
    kept = sa.select(*list(placed.c)[:-2])
    kept = kept.where((placed.c.place == 1) | (placed.c.number == 1)).order_by(placed.c.seq)
    return sa.select(_columns_as_json(dialect, kept))


def _events(event_weights: EventWeights) -> sa.Select[Any]:
    weight = event_weights.expression(events.c.type, events.c.value).label("weight")
    return sa.select(events.c.item_id, events.c.seq, event_time(), weight)


def _columns_as_json(dialect: str, rows: sa.Select[Any]) -> sa.ScalarSelect[Any]:
    """Return a user's rows as one JSON value: a list of the columns, each a list."""
    ordered = rows.subquery()
    text: sa.ColumnElement[Any]
    if dialect == "sqlite":
        text = sa.func.json_array(*(sa.func.json_group_array(column) for column in ordered.c))
    else:
        # PostgreSQL takes twice as long to build JSON, and the driver to read arrays.
        joined = (
            sa.func.coalesce(sa.func.array_to_string(sa.func.array_agg(column), ","), "")
            for column in ordered.c
        )
        text = sa.func.concat("[[", *_joined(joined, "],["), "]]")
    return sa.select(text).correlate(users).scalar_subquery()


def _joined(parts: Iterable[Any], separator: str) -> list[Any]:
    return [each for part in parts for each in (separator, part)][1:]
