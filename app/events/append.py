"""The transactions that append events and stated preferences.

A transaction tells new rows, duplicates and conflicts apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import TYPE_CHECKING

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.database import Database
from app.core.tables import EVENT_SEQ, next_values
from app.events.counts import EventCounts
from app.events.repository import EventRepository
from app.events.schemas import (
    AppendResult,
    NewEvent,
    NewPreference,
    Rejection,
    StoredEvent,
    StoredPreference,
    events_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

_CONFLICT = "an event with other content already has this event_id"


class EventAppender:
    """Appends the events of several requests in one transaction."""

    def __init__(
        self,
        database: Database,
        repository: EventRepository,
        catalog: CatalogService,
        announce: Callable[[], None],
        counts: EventCounts,
    ) -> None:
        self._database = database
        self._repository = repository
        self._catalog = catalog
        self._announce = announce
        self._counts = counts

    async def append(self, batches: Sequence[Sequence[NewEvent]]) -> list[AppendResult]:
        """Commit the events of all batches, and return a result for each batch.

        The rejections of a result have indices into its batch.
        """
        types: Counter[str] = Counter()
        async with self._database.write() as conn:
            results = await self.append_in(conn, batches, types)
        self._counts.add("accepted", types)
        self._announce()
        return results

    async def append_likely_new(
        self, batch: pa.RecordBatch, item_ids: MutableMapping[str, int]
    ) -> AppendResult:
        """Append a batch as `append_many` does, but faster if no event is stored yet.

        If an event is stored already, the batch takes longer than with `append_many`.

        Args:
            batch: columns with the fields of `NewEvent`.
            item_ids: internal ids of the items of earlier batches, by the client's id. The call
                adds the new items of this batch, unless an event was stored already. The internal
                id of an item never changes.
        """
        items = batch["item"].unique().to_pylist()
        unknown = [item for item in items if item not in item_ids]
        try:
            async with self._database.bulk_write() as conn:
                first_seq = await next_values(conn, EVENT_SEQ, batch.num_rows)
                found = await self._catalog.ensure_items(conn, unknown) if unknown else {}
                ids = {item: found.get(item) or item_ids[item] for item in items}
                await self._repository.add_event_columns(conn, first_seq, batch, ids)
        except IntegrityError:  # a row is stored already, or comes twice
            return await self.append_many(events_of(batch))
        item_ids.update(found)  # only now: an item whose creation was rolled back has no id
        self._counts.add("accepted", _numbers_by_type(batch))
        self._announce()
        return AppendResult(batch.num_rows, last_seq=first_seq + batch.num_rows - 1)

    async def append_many(self, rows: Sequence[NewEvent]) -> AppendResult:
        """Append one batch as `append` does, for tens of thousands of rows."""
        types: Counter[str] = Counter()
        async with self._database.bulk_write() as conn:
            results = await self.append_in(conn, [rows], types)
        self._counts.add("accepted", types)
        self._announce()
        return results[0]

    async def _add(
        self, conn: AsyncConnection, first_seq: int, new_events: Collection[NewEvent]
    ) -> None:
        """Store events that are not stored yet under consecutive seqs, with their items."""
        # In the order of the events: the same events make the same rows, and the same model.
        items = list(dict.fromkeys(event.item for event in new_events))
        item_ids = await self._catalog.ensure_items(conn, items)
        await self._repository.add_events(conn, first_seq, new_events, item_ids)

    async def append_in(
        self,
        conn: AsyncConnection,
        batches: Sequence[Sequence[NewEvent]],
        types: Counter[str],
    ) -> list[AppendResult]:
        """Append events in the caller's transaction, and count the new events in ``types``."""
        # The lock comes first: what is read below stays true until the commit.
        first_seq = await next_values(conn, EVENT_SEQ, 0)
        rows = [event for batch in batches for event in batch]
        stored = await self._repository.stored_events(conn, [event.event_id for event in rows])
        stored_users: dict[str, int] = {}
        stored_items: dict[str, int] = {}
        if stored:
            # Of each user and item once: a join would look up the user of every event.
            repeated = [event for event in rows if event.event_id in stored]
            stored_users = await self._repository.user_ids(conn, {e.user for e in repeated})
            stored_items = await self._catalog.ids_of({e.item for e in repeated}, conn)

        new_events: dict[str, NewEvent] = {}
        new_seqs: dict[str, int] = {}
        results = []
        for batch in batches:
            result = AppendResult()
            last_new = last_duplicate = 0
            for index, event in enumerate(batch):
                event_id = event.event_id
                if event_id in stored:
                    earlier = stored[event_id]
                    seq = earlier.seq
                    is_duplicate = (
                        earlier.user_id == stored_users.get(event.user)
                        and earlier.item_id == stored_items.get(event.item)
                        and _has_content_of(event, earlier)
                    )
                elif event_id in new_events:
                    same_id = new_events[event_id]
                    seq = new_seqs[event_id]
                    is_duplicate = (
                        same_id.user == event.user
                        and same_id.item == event.item
                        and _has_content_of(event, same_id)
                    )
                else:
                    last_new = new_seqs[event_id] = first_seq + len(new_events)
                    new_events[event_id] = event
                    result.accepted += 1
                    continue
                if is_duplicate:
                    result.duplicates += 1
                    last_duplicate = max(last_duplicate, seq)
                else:
                    result.rejected.append(Rejection(index, "event_id_conflict", _CONFLICT))
            result.last_seq = last_new or last_duplicate or first_seq + len(new_events) - 1
            results.append(result)

        if new_events:
            # Only now, so that rejected rows leave no users and items behind.
            await next_values(conn, EVENT_SEQ, len(new_events))
            await self._add(conn, first_seq, new_events.values())
            types.update(event.type for event in new_events.values())
        return results


def _numbers_by_type(batch: pa.RecordBatch) -> dict[str, int]:
    counts = batch["type"].value_counts()
    return {each["values"]: each["counts"] for each in counts.to_pylist()}


def _has_content_of(event: NewEvent, earlier: NewEvent | StoredEvent) -> bool:
    """Return whether an event equals an earlier one, apart from its user and item."""
    return (
        earlier.type == event.type
        and earlier.value == event.value
        and earlier.recommendation_id == event.recommendation_id
        # A retry without a timestamp cannot repeat the time that the service gave the first one.
        and (not event.timestamp_given or earlier.timestamp == event.timestamp)
    )


async def append_preferences(
    conn: AsyncConnection,
    repository: EventRepository,
    catalog: CatalogService,
    rows: Sequence[NewPreference],
    deleted: Collection[int],
    *,
    skip_stored: bool = False,
) -> AppendResult:
    """Append preferences in the caller's transaction.

    The transaction creates unknown users, but no items.

    Args:
        conn: the transaction.
        repository: stores the rows.
        catalog: knows the items.
        rows: valid preferences. Preferences about unknown or deleted items are rejected.
        deleted: internal ids of deleted items.
        skip_stored: whether preferences that are stored already, or that repeat in ``rows``, count
            as duplicates.
    """
    # The lock comes first, as for events: both share one order.
    first_seq = await next_values(conn, EVENT_SEQ, 0)
    names = {name for row in rows for name in (row.winner, row.loser)}
    item_ids = {
        name: item_id
        for name, item_id in (await catalog.ids_of(names, conn)).items()
        if item_id not in deleted
    }
    result = AppendResult(last_seq=first_seq - 1)
    valid: list[NewPreference] = []
    for index, row in enumerate(rows):
        unknown = next((name for name in (row.winner, row.loser) if name not in item_ids), None)
        if unknown is None:
            valid.append(row)
        else:
            detail = f"unknown item {unknown[:64]!r}"
            result.rejected.append(Rejection(index, "unknown_item", detail))
    if skip_stored and valid:
        new = await _not_stored(conn, repository, valid, item_ids)
        result.duplicates = len(valid) - len(new)
        valid = new
    if not valid:
        return result
    user_ids = await repository.ensure_users(conn, [row.user for row in valid])
    await next_values(conn, EVENT_SEQ, len(valid))
    await repository.add_preferences(
        conn,
        [
            StoredPreference(
                seq, user_ids[row.user], item_ids[row.winner], item_ids[row.loser], row.timestamp
            )
            for seq, row in enumerate(valid, first_seq)
        ],
    )
    result.accepted = len(valid)
    result.last_seq = first_seq + len(valid) - 1
    return result


async def _not_stored(
    conn: AsyncConnection,
    repository: EventRepository,
    rows: Sequence[NewPreference],
    item_ids: dict[str, int],
) -> list[NewPreference]:
    """Return the distinct rows that are not stored yet."""
    user_ids = await repository.user_ids(conn, {row.user for row in rows})
    stored = await repository.stored_preferences(conn, set(user_ids.values()))
    return [
        row
        for row in dict.fromkeys(rows)
        # An unknown user has no id, and so nothing stored.
        if (user_ids.get(row.user), item_ids[row.winner], item_ids[row.loser], row.timestamp)
        not in stored
    ]
