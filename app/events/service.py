"""What the rest of the service asks of users and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.errors import NotFound
from app.core.metadata import EVENT_SEQ, next_values
from app.core.overload import Places
from app.core.settings import Settings
from app.events.append import append
from app.events.feedback import Feedback
from app.events.preferences import append_preferences, parse_preference
from app.events.profile import Profile
from app.events.profiles import Profiles
from app.events.repository import EventRepository
from app.events.schemas import (
    AppendResult,
    ImportResult,
    NewEvent,
    NewPreference,
    Rejection,
    StoredEvent,
    parse_event,
)
from app.events.snapshot import EventSnapshot, read_snapshot
from app.events.takers import Taking
from app.events.writer import MOST_ROWS, EventWriter

MOST_STATING = 64  # lists of preferences that are being written


class EventService:
    """Users and their events. `start()` before the first `add`, `drain()` before the end."""

    def __init__(self, database: Database, catalog: CatalogService, settings: Settings) -> None:
        self.settings = settings
        self._database = database
        self._catalog = catalog
        self.feedback = Feedback.of(settings)
        """What events mean."""
        self._repository = EventRepository(database, self.feedback)
        self._stating = Places(
            MOST_STATING, "too many preferences are waiting to be written", "backpressure"
        )
        self.verdicts = {"accepted": 0, "duplicate": 0, "rejected": 0}
        """How many rows of clients had which verdict."""
        self.announce: Callable[[], None] = lambda: None
        """Called after a commit that others may want to know of."""
        self.on_erase: list[Callable[[AsyncConnection, int], Awaitable[None]]] = []
        """Called with a user's internal id in the transaction that erases them, so that nothing of
        theirs is left with others."""
        self.profiles = Profiles(database, self._repository, settings.profile_cache_bytes)
        self.writer = EventWriter(
            self._append,
            group_rows=settings.event_group_rows,
            group_ms=settings.event_group_ms,
            buffer_rows=settings.event_buffer_rows,
            most_rows=MOST_ROWS,
        )

    def start(self) -> None:
        """Start the group commit."""
        self.writer.start()

    async def drain(self) -> None:
        """Write what was accepted and take nothing more."""
        await self.writer.drain()

    async def add_rows(
        self, rows: Sequence[object], now: int, *, offset: int = 0, wait: bool = False
    ) -> AppendResult:
        """Check rows as a client sent them and add those that are valid.

        `offset` is the index of the first; returns after the commit.
        """
        valid: list[NewEvent] = []
        indices: list[int] = []
        rejected: list[Rejection] = []
        for index, row in enumerate(rows, offset):
            event = parse_event(row, index, now)
            if isinstance(event, NewEvent):
                valid.append(event)
                indices.append(index)
            else:
                rejected.append(event)
        self.verdicts["rejected"] += len(rejected)
        result = await self.add(valid, wait=wait)
        self.verdicts["accepted"] += result.accepted
        self.verdicts["duplicate"] += result.duplicates
        self.verdicts["rejected"] += len(result.rejected)
        rejected += [replace(bad, index=indices[bad.index]) for bad in result.rejected]
        rejected.sort()
        result.rejected = rejected
        return result

    async def add(self, events: Sequence[NewEvent], *, wait: bool = False) -> AppendResult:
        """Add valid events through the group commit; returns after the commit."""
        if not events:
            return AppendResult(last_seq=await self.last_seq())
        return await self.writer.submit(events, wait=wait)

    async def import_rows(self, rows: Sequence[NewEvent]) -> ImportResult:
        """Add a chunk of a data set (some 20,000 rows) in a transaction of its own."""
        result = (await self._append([rows]))[0]
        return ImportResult(result.accepted, result.duplicates, len(result.rejected))

    async def _append(self, batches: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        async with self._database.write() as conn:
            results = await append(conn, self._repository, self._catalog, batches)
        self.announce()
        return results

    async def prefer(self, rows: Sequence[object], now: int) -> AppendResult:
        """Check stated preferences as a client sent them and add those that are valid.

        Each list is a transaction of its own: events are waiting to be written, too. Raises
        Unavailable where many lists wait already.
        """
        valid: list[NewPreference] = []
        indices: list[int] = []
        rejected: list[Rejection] = []
        for index, row in enumerate(rows):
            found = parse_preference(row, index, now)
            if isinstance(found, NewPreference):
                valid.append(found)
                indices.append(index)
            else:
                rejected.append(found)
        if not valid:
            return AppendResult(rejected=rejected, last_seq=await self.last_seq())
        deleted = (await self._catalog.catalogue()).deleted
        with self._stating.one():
            async with self._database.write() as conn:
                result = await append_preferences(
                    conn, self._repository, self._catalog, valid, deleted
                )
        self.announce()
        rejected += [replace(bad, index=indices[bad.index]) for bad in result.rejected]
        result.rejected = sorted(rejected)
        return result

    async def import_preferences(self, rows: Sequence[NewPreference]) -> AppendResult:
        """Add a chunk of valid preferences in a transaction of its own, but none that is there."""
        deleted = (await self._catalog.catalogue()).deleted
        async with self._database.write() as conn:
            result = await append_preferences(
                conn, self._repository, self._catalog, rows, deleted, once=True
            )
        self.announce()
        return result

    async def delete_event(self, event_id: str) -> None:
        """Delete an event. The user moves on to a new seq: what was cached of them is stale."""
        async with self._database.write() as conn:
            # Even so the lock comes first, in the same order as when events are added.
            seq = await next_values(conn, EVENT_SEQ, 0)
            user_id = await self._repository.delete_event(conn, event_id)
            if user_id is None:
                raise NotFound("there is no such event", code="unknown_event")
            await next_values(conn, EVENT_SEQ)
            await self._repository.touch_user(conn, user_id, seq)
        self.announce()

    async def delete_user(self, external_id: str) -> None:
        """Erase a user and all that they did and said."""
        async with self._database.write() as conn:
            seq = await next_values(conn, EVENT_SEQ, 0)
            user_id = await self._repository.lock_user(conn, external_id)
            if user_id is None:
                raise NotFound("there is no such user", code="unknown_user")
            for erase in self.on_erase:
                await erase(conn, user_id)
            await self._repository.delete_user(conn, user_id, seq)
            await next_values(conn, EVENT_SEQ)
        self.announce()

    async def history(
        self, external_id: str, below: int | None, n: int
    ) -> tuple[list[tuple[StoredEvent, str]], int | None]:
        """A page of a user's events with their items' ids, newest first, and where it goes on."""
        user_id = await self._repository.find_user(external_id)
        if user_id is None:
            raise NotFound("there is no such user", code="unknown_user")
        # One more than asked for tells whether there is another page.
        events = await self._repository.history(user_id, below, n + 1)
        following = events[n - 1].seq if len(events) > n else None
        names = await self._catalog.external_ids_of({event.item_id for event in events})
        return [(event, names[event.item_id]) for event in events[:n]], following

    async def every(
        self, external_id: str | None = None, chunk: int = 5_000
    ) -> AsyncIterator[list[tuple[StoredEvent, str, str]]]:
        """All events, or those of a user, with the ids of their users and items; in order.

        Read a chunk at a time, up to what there is at the beginning. 404 for an unknown user.
        """
        user_id = None
        if external_id is not None:
            user_id = await self._repository.find_user(external_id)
            if user_id is None:
                raise NotFound("there is no such user", code="unknown_user")
        after, until = 0, await self.last_seq()
        while found := await self._repository.in_order(after, until, chunk, user_id):
            names = await self._catalog.external_ids_of({event.item_id for event, _ in found})
            yield [(event, user, names[event.item_id]) for event, user in found]
            after = found[-1][0].seq

    async def every_preference(
        self, external_id: str | None = None, chunk: int = 5_000
    ) -> AsyncIterator[list[NewPreference]]:
        """All stated preferences, or those of a user, in order; as `every`."""
        user_id = None
        if external_id is not None:
            user_id = await self._repository.find_user(external_id)
            if user_id is None:
                raise NotFound("there is no such user", code="unknown_user")
        after, until = 0, await self.last_seq()
        while found := await self._repository.preferences_in_order(after, until, chunk, user_id):
            ids = {item for row, _ in found for item in (row.winner_id, row.loser_id)}
            names = await self._catalog.external_ids_of(ids)
            yield [
                NewPreference(user, names[row.winner_id], names[row.loser_id], row.timestamp)
                for row, user in found
            ]
            after = found[-1][0].seq

    async def profile(self, external_id: str, min_seq: int | None = None) -> Profile:
        """What is known of a user; an unknown one has an empty profile. See `Profiles.get`."""
        return await self.profiles.get(external_id, min_seq)

    async def last_seq(self) -> int:
        """The highest seq given out, by an event, a preference or a deletion."""
        return await self._repository.last_seq()

    async def popularity(self) -> list[tuple[int, int]]:
        """`(item, distinct users)` for every item with positive events; internal ids, no order."""
        return await self._repository.popularity()

    async def taken_with(self, item_id: int, most_users: int) -> tuple[int, list[tuple[int, int]]]:
        """How many of an item's newest users were looked at, and `(item, users)` of the other items
        that they took up; internal ids, no order.
        """
        return await self._repository.taken_with(item_id, most_users)

    async def new_events(self, since_seq: int, limit: int = 100_000) -> list[tuple[int, int, int]]:
        """`(seq, user, item)` of at most `limit` positive events after `since_seq`, in order.

        Nothing is ever missed by going on from the last seq: seqs are in the order of commits.
        """
        return await self._repository.since(since_seq, limit)

    async def met(self, since_seq: int, known_by: int, limit: int) -> list[tuple[int, int, int]]:
        """`(item, events, last seq)` of the first `limit` positive events after `since_seq`: how
        many are of users whom the service had met up to `known_by`. Go on from the highest seq."""
        return await self._repository.met(since_seq, known_by, limit)

    async def takers(self, items: Collection[int], known_by: int, most: int) -> list[Taking]:
        """Who took these items up, of those whom the service had met up to `known_by`: for each
        item the `most` users whose last word about it is positive and came last, in that order."""
        return await self._repository.takers(items, known_by, most)

    async def example_user(self) -> str | None:
        """A user with a history that is neither short nor long, to show; None without events."""
        return await self._repository.example_user()

    async def active_users(self, n: int) -> list[tuple[int, str, int]]:
        """`(id, client's id, last seq)` of the users that something happened to last."""
        return await self._repository.active_users(n)

    async def external_users(self, ids: Collection[int]) -> dict[int, str]:
        """The clients' ids of users."""
        return await self._repository.external_users(ids)

    async def snapshot_for_training(self) -> EventSnapshot:
        """All events and stated preferences as arrays."""
        return await asyncio.to_thread(read_snapshot, self._database.url, self.feedback)
