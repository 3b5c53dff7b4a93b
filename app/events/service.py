"""Public interface of the events feature: users, their events, preferences and profiles."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    MutableMapping,
    Sequence,
)
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.errors import NotFound
from app.core.ids import HOUR_MS
from app.core.middleware import ConcurrencyLimiter
from app.core.requests import MAX_ROWS_AT_ONCE, ROWS_A_STEP, Steps, at_once, in_turn
from app.core.settings import Settings
from app.core.tables import EVENT_SEQ, next_values, now_us
from app.events.adopters import AdopterRepository
from app.events.append import EventAppender, append_preferences
from app.events.counts import EventCounts
from app.events.event_weights import EventWeights
from app.events.group_commit import MAX_ROWS, CommitObserver, GroupCommit, ignore_commit
from app.events.imports import ImportLog
from app.events.item_index import ItemIndex
from app.events.profile_cache import ProfileCache
from app.events.repository import EventRepository
from app.events.schemas import (
    Adoption,
    AppendResult,
    ImportResult,
    NewEvent,
    NewPreference,
    Rejection,
    StoredEvent,
    parse_event,
    parse_preference,
)
from app.events.seen_history import SeenHistories
from app.events.seen_rule import settings_hidden_time, settings_rule
from app.events.shown_lists import ShownLists, delete_shown
from app.events.throw_away import (
    KEEP_HOURS,
    THROW_AWAY_LENGTH,
    THROW_AWAY_PREFIX,
    is_throw_away,
)
from app.events.window_counts import WindowCounts

if TYPE_CHECKING:
    import pyarrow as pa

ERASED_AT_ONCE = 500
MAX_PREFERENCE_WRITES = 64  # lists of preferences that are written at a time

EraseUser = Callable[[AsyncConnection, int | None, str], Awaitable[int]]
"""Erases another feature's data of a user, by both ids, in the given transaction.

The internal id is None for a user without events. The function returns the number of erased rows.
"""

RowT = TypeVar("RowT", NewEvent, NewPreference)


class EventService:
    """Users, events and preferences.

    A caller needs `start()` before the first event, and `drain()` at the end.
    """

    def __init__(
        self,
        database: Database,
        catalog: CatalogService,
        settings: Settings,
        *,
        announce: Callable[[], None] = lambda: None,
        on_erase: Sequence[EraseUser] = (),
        observe_commit: CommitObserver = ignore_commit,
    ) -> None:
        """Build the feature.

        Args:
            database: where events are stored.
            catalog: creates and names items.
            settings: the weights of events, and the sizes of queues and caches.
            announce: called after each commit, to tell other servers.
            on_erase: called in the transaction that erases a user, for other features' data.
            observe_commit: called after each group commit, for metrics.
        """
        self.settings = settings
        self._database = database
        self._catalog = catalog
        self._announce = announce
        self._on_erase = tuple(on_erase)
        self.event_weights = EventWeights.from_settings(settings)
        self._repository = EventRepository(database, self.event_weights)
        self.item_index = ItemIndex(database)
        self._windows = WindowCounts(database, self.event_weights)
        self._adopters = AdopterRepository(database, self.event_weights)
        self._preference_writes = ConcurrencyLimiter(
            MAX_PREFERENCE_WRITES,
            "too many preferences are waiting to be written",
            "backpressure",
        )
        self.row_counts = {"accepted": 0, "duplicate": 0, "rejected": 0}
        """The number of rows that clients posted, by outcome."""
        self.profiles = ProfileCache(database, self.event_weights, settings.profile_cache_bytes)
        self.seen_rule = settings_rule(settings)
        """The rule for seen items in lists whose request has no rule of its own."""
        self.hidden_us = settings_hidden_time(settings)
        """The time, in microseconds, for which shown items without a later event stay out of lists
        whose request has no time of its own; 0: shown items stay in."""
        self.seen_histories = SeenHistories(
            database, self.event_weights, settings.profile_cache_bytes // 2
        )
        self.shown = ShownLists(database)
        self.counts = EventCounts(database)
        """The counts of rows by hour, verdict and name, of all servers."""
        self.imports = ImportLog(database)
        """The last imports of files."""
        self._appender = EventAppender(database, self._repository, catalog, announce, self.counts)
        self.group_commit = GroupCommit(
            self._appender.append,
            group_rows=settings.event_group_rows,
            group_ms=settings.event_group_ms,
            buffer_rows=settings.event_buffer_rows,
            max_rows=MAX_ROWS,
            observe=observe_commit,
        )

    def start(self) -> None:
        """Start the group commit and the writing of counts."""
        self.group_commit.start()
        self.counts.start()

    async def drain(self) -> None:
        """Write the accepted events and refuse new ones."""
        await self.group_commit.drain()
        await self.counts.close()
        await self.shown.close()

    # Events

    async def add_rows(
        self,
        rows: Sequence[object],
        now: int,
        *,
        wait: bool = False,
        known_items_only: bool = False,
    ) -> AppendResult:
        """Validate rows of a client, store the valid ones, and return after the commit.

        Args:
            rows: parsed JSON values.
            now: the default timestamp, in microseconds since 1970.
            wait: whether to wait while too many events are waiting, instead of raising.
            known_items_only: whether to reject rows about unknown items.

        Raises:
            Unavailable: too many events are waiting, the service is stopping, or the database is
                unavailable.
        """
        valid, indices, rejected = await _parsed(parse_event, rows, now)
        if known_items_only and valid:
            known = await self._catalog.ids_of({event.item for event in valid})
            unknown = [
                Rejection(index, "unknown_item", f"unknown item {event.item[:64]!r}")
                for event, index in zip(valid, indices, strict=True)
                if event.item not in known
            ]
            rejected = [*rejected, *unknown]
            valid = [event for event in valid if event.item in known]
            outside = {rejection.index for rejection in rejected}
            indices = [index for index in indices if index not in outside]
        self.row_counts["rejected"] += len(rejected)
        if valid:
            result = await self.group_commit.submit(valid, wait=wait)
        else:
            result = AppendResult(last_seq=await self.last_seq())
        self.row_counts["accepted"] += result.accepted
        self.row_counts["duplicate"] += result.duplicates
        self.row_counts["rejected"] += len(result.rejected)
        result = await _with_rejected(result, rejected, indices)
        if result.rejected:
            self.counts.add("rejected", Counter(each.code for each in result.rejected))
        if result.duplicates:
            self.counts.add("duplicate", {"": result.duplicates})
        return result

    async def import_rows(self, rows: Sequence[NewEvent]) -> ImportResult:
        """Store a chunk of a data set (some 50,000 rows) in a transaction of its own."""
        return _import_result(await self._appender.append_many(rows))

    async def import_new(
        self, batch: pa.RecordBatch, item_ids: MutableMapping[str, int]
    ) -> ImportResult:
        """Store a batch as `import_rows` does, but first without a search for stored events.

        Args:
            batch: columns with the fields of `NewEvent`.
            item_ids: internal ids by the client's id. All batches of an import share the mapping,
                so that each item is looked up once.
        """
        return _import_result(await self._appender.append_likely_new(batch, item_ids))

    async def delete_event(self, event_id: str) -> None:
        """Delete an event. The user gets a new last seq, so caches of the user become stale.

        Raises:
            NotFound: the event does not exist.
        """
        async with self._database.write() as conn:
            # The lock comes first, in the same order as when events are added.
            seq = await next_values(conn, EVENT_SEQ, 0)
            user_id = await self._repository.delete_event(conn, event_id)
            if user_id is None:
                raise NotFound("the event does not exist", code="unknown_event")
            await next_values(conn, EVENT_SEQ)
            await self._repository.record_retraction(conn, user_id, seq)
        self._announce()

    async def history(
        self, external_id: str, below: int | None, n: int
    ) -> tuple[list[tuple[StoredEvent, str]], int | None]:
        """Return a page of a user's events with their items' client ids, newest first.

        Returns:
            The events, and the seq below which the next page begins; None after the last page.

        Raises:
            NotFound: the user is unknown.
        """
        user_id = await self._find_user(external_id)
        # One more than the page holds: whether there is another page.
        events = await self._repository.history(user_id, below, n + 1)
        next_below = events[n - 1].seq if len(events) > n else None
        names = await self._catalog.external_ids_of({event.item_id for event in events})
        return [(event, names[event.item_id]) for event in events[:n]], next_below

    async def iter_events(
        self, external_id: str | None = None, chunk_size: int = 5_000
    ) -> AsyncIterator[list[tuple[StoredEvent, str, str]]]:
        """Yield all events, or the events of a user, in order, up to the last seq at the start.

        Events that a merge of users moves beyond that seq meanwhile come at the end. Moved events
        that were yielded before come twice, once for each user.

        Yields:
            Lists of events with the client ids of their user and item.

        Raises:
            NotFound: the user is unknown.
        """
        user_id = None if external_id is None else await self._find_user(external_id)
        after, until = 0, await self.last_seq()
        for moved in (False, True):
            while rows := await self._repository.events_in_order(
                after, until, chunk_size, user_id, moved=moved
            ):
                names = await self._catalog.external_ids_of({event.item_id for event, _ in rows})
                yield [(event, user, names[event.item_id]) for event, user in rows]
                after = rows[-1][0].seq
            after, until = until, await self.last_seq()

    async def last_seq(self) -> int:
        """Return the highest seq of an event, a preference or a deletion."""
        return await self._repository.last_seq()

    # Stated preferences

    async def add_preferences(self, rows: Sequence[object], now: int) -> AppendResult:
        """Validate preferences of a client and store the valid ones, see `add_rows`.

        Each list has a transaction of its own, outside the group commit of events.

        Raises:
            Unavailable: too many lists are being written.
        """
        valid, indices, rejected = await _parsed(parse_preference, rows, now)
        if not valid:
            return AppendResult(rejected=rejected, last_seq=await self.last_seq())
        with self._preference_writes.one():
            result = await self._append_preferences(valid)
        return await _with_rejected(result, rejected, indices)

    async def import_preferences(self, rows: Sequence[NewPreference]) -> AppendResult:
        """Store the valid preferences of a chunk that are not stored yet."""
        return await self._append_preferences(rows, skip_stored=True)

    async def _append_preferences(
        self, rows: Sequence[NewPreference], *, skip_stored: bool = False
    ) -> AppendResult:
        deleted = (await self._catalog.catalogue()).deleted
        write = self._database.bulk_write if skip_stored else self._database.write
        async with write() as conn:
            result = await append_preferences(
                conn, self._repository, self._catalog, rows, deleted, skip_stored=skip_stored
            )
        self._announce()
        return result

    async def iter_preferences(
        self, external_id: str | None = None, chunk_size: int = 5_000
    ) -> AsyncIterator[list[NewPreference]]:
        """Yield stated preferences, as `iter_events` yields events."""
        user_id = None if external_id is None else await self._find_user(external_id)
        after, until = 0, await self.last_seq()
        for moved in (False, True):
            while rows := await self._repository.preferences_in_order(
                after, until, chunk_size, user_id, moved=moved
            ):
                item_ids = {item for row, _ in rows for item in (row.winner_id, row.loser_id)}
                names = await self._catalog.external_ids_of(item_ids)
                yield [
                    NewPreference(user, names[row.winner_id], names[row.loser_id], row.timestamp)
                    for row, user in rows
                ]
                after = rows[-1][0].seq
            after, until = until, await self.last_seq()

    # Users

    async def delete_user(self, external_id: str) -> None:
        """Erase a user with all events, preferences and data of other features.

        A user without events can have shown lists and counts of a trial, which are erased, too.

        Raises:
            NotFound: the service stores no data of the user.
        """
        async with self._database.write() as conn:
            seq = await next_values(conn, EVENT_SEQ, 0)
            user_id = await self._repository.lock_user(conn, external_id)
            erased = self.shown.forget(external_id) + await delete_shown(conn, external_id)
            for erase in self._on_erase:
                erased += await erase(conn, user_id, external_id)
            if user_id is None:
                if not erased:
                    raise _unknown_user()
                return
            await self._repository.delete_user(conn, user_id, seq)
            await next_values(conn, EVENT_SEQ)
        self._announce()

    async def iter_users(
        self, chunk_size: int = 5_000
    ) -> AsyncIterator[list[tuple[str, int, dict[str, Any]]]]:
        """Yield ``(client's id, created at, attributes)`` of all users, oldest first.

        The time is in microseconds since 1970. Users who are created meanwhile are left out.
        """
        after, (_, until) = 0, await self._repository.count_users()
        while rows := await self._repository.users_in_order(after, until, chunk_size):
            yield [(user, created_at, attributes) for _, user, created_at, attributes in rows]
            after = rows[-1][0]

    async def count_users(self) -> int:
        """Return the number of users."""
        return (await self._repository.count_users())[0]

    async def example_user(self) -> str | None:
        """Return a user for a demonstration, see `EventRepository.example_user`."""
        return await self._repository.example_user()

    async def active_users(self, n: int) -> list[tuple[int, str, int]]:
        """Return ``(internal id, client's id, last seq)`` of the ``n`` users who changed last."""
        return await self._repository.active_users(n)

    async def times_by_item(self, user_ids: Collection[int]) -> NDArray[np.int64]:
        """Return (n, 3) users, items and times of all events of some users, ordered by user.

        Times are in microseconds since 1970.
        """
        return await self._repository.times_by_item(user_ids)

    async def find_users(self, prefix: str, n: int) -> list[str]:
        """Return at most ``n`` client ids that begin with a text."""
        return await self._repository.find_users(prefix, n)

    async def users_containing(self, text: str, n: int, rows: int) -> list[str]:
        """Return at most ``n`` client ids of the ``rows`` newest users that contain a text."""
        return await self._repository.users_containing(text, n, rows)

    async def recent_users(self, n: int) -> list[tuple[str, int]]:
        """Return ``(client id, time)`` of users, see `EventRepository.recent_users`."""
        return await self._repository.recent_users(n)

    async def takers_by_day(self, item_id: int, limit: int) -> list[tuple[int, int]]:
        """Count at most ``limit`` events about an item by day: ``(days since 1970, events)``."""
        return await self._repository.takers_by_day(item_id, limit)

    async def erase_throw_away_users(self) -> None:
        """Erase at most ``ERASED_AT_ONCE`` throw-away users who are older than 24 hours."""
        before = now_us() - KEEP_HOURS * HOUR_MS * 1_000
        old = await self._repository.users_before(
            THROW_AWAY_PREFIX, THROW_AWAY_LENGTH, before, ERASED_AT_ONCE
        )
        for user in filter(is_throw_away, old):
            with contextlib.suppress(NotFound):  # another worker was first
                await self.delete_user(user)

    async def delete_old_retractions(self) -> None:
        """Delete old retractions and old counts of rows."""
        await self._repository.delete_old_retractions()
        await self.counts.delete_old()

    async def delete_old_shown_lists(self) -> None:
        """Delete the shown lists that are too old for every rule."""
        await self.shown.delete_old()

    async def _find_user(self, external_id: str) -> int:
        user_id = await self._repository.find_user(external_id)
        if user_id is None:
            raise _unknown_user()
        return user_id

    # Feedback by item, for recommendations

    async def popularity(self) -> tuple[int, list[tuple[int, int]]]:
        """Return a seq, and ``(item, users with a positive event)`` up to the seq, in any order."""
        return await self._repository.popularity()

    async def users_by_item(self, since: int, split: int, until: int) -> list[tuple[int, int, int]]:
        """Count the users of items in two windows of time, see `WindowCounts.users_by_item`."""
        return await self._windows.users_by_item(since, split, until)

    async def co_occurrences(
        self, item_id: int, max_users: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Count the users of other items, see `EventRepository.co_occurrences`."""
        return await self._repository.co_occurrences(item_id, max_users)

    async def new_events(self, since_seq: int, limit: int = 100_000) -> list[tuple[int, int, int]]:
        """Return ``(seq, user, item)`` of the next positive events after a seq, in order.

        A reader that continues after the last seq misses no event, because seqs are in the order of
        commits.
        """
        return await self._repository.positive_events(since_seq, limit)

    async def new_adoptions(self, since_seq: int, limit: int) -> list[tuple[int, int, bool]]:
        """Return ``(seq, item, is the user's first)`` of the next positive events after a seq."""
        return await self._repository.new_adoptions(since_seq, limit)

    async def is_retracted_since(self, seq: int) -> bool:
        """Return whether an event or a user was deleted after a seq."""
        return await self._repository.is_retracted_since(seq)

    async def new_item_usage(
        self, since_seq: int, known_by: int, limit: int
    ) -> list[tuple[int, int, int]]:
        """Count new events by item, see `AdopterRepository.new_item_usage`."""
        return await self._adopters.new_item_usage(since_seq, known_by, limit)

    async def adopters(
        self, items: Collection[int], known_by: int, max_users: int
    ) -> list[Adoption]:
        """Return the latest adopters of new items, see `AdopterRepository.adopters`."""
        return await self._adopters.adopters(items, known_by, max_users)


async def _parsed(
    parse: Callable[[object, int, int], RowT | Rejection], rows: Sequence[object], now: int
) -> tuple[list[RowT], list[int], list[Rejection]]:
    work = _parse(parse, rows, now)
    return at_once(work) if len(rows) <= MAX_ROWS_AT_ONCE else await in_turn(work)


def _parse(
    parse: Callable[[object, int, int], RowT | Rejection], rows: Sequence[object], now: int
) -> Steps[tuple[list[RowT], list[int], list[Rejection]]]:
    """The valid rows, their indices, and the rejections of the others."""
    valid: list[RowT] = []
    indices: list[int] = []
    rejected: list[Rejection] = []
    for index, row in enumerate(rows):
        parsed = parse(row, index, now)
        if isinstance(parsed, Rejection):
            rejected.append(parsed)
        else:
            valid.append(parsed)
            indices.append(index)
        if index % ROWS_A_STEP == ROWS_A_STEP - 1:
            yield
    return valid, indices, rejected


async def _with_rejected(
    result: AppendResult, rejected: list[Rejection], indices: list[int]
) -> AppendResult:
    """Merge the rejections of two stages; the indices in ``result`` are those of valid rows."""
    work = _renumbered(result.rejected, indices)
    is_long = len(result.rejected) > MAX_ROWS_AT_ONCE
    later = await in_turn(work) if is_long else at_once(work)
    result.rejected = sorted([*rejected, *later], key=attrgetter("index"))
    return result


def _renumbered(rejected: Sequence[Rejection], indices: list[int]) -> Steps[list[Rejection]]:
    renumbered = []
    for n, rejection in enumerate(rejected, 1):
        renumbered.append(replace(rejection, index=indices[rejection.index]))
        if not n % ROWS_A_STEP:
            yield
    return renumbered


def _unknown_user() -> NotFound:
    return NotFound("the user does not exist", code="unknown_user")


def _import_result(result: AppendResult) -> ImportResult:
    return ImportResult(result.accepted, result.duplicates, len(result.rejected))
