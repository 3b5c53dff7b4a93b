"""The transaction that adds events: which are new, which were there, which contradict."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.metadata import EVENT_SEQ, next_values
from app.events.repository import EventRepository
from app.events.schemas import AppendResult, NewEvent, Rejection, StoredEvent

_CONFLICT = "another event with other content has this event_id"


async def append(
    conn: AsyncConnection,
    repository: EventRepository,
    catalog: CatalogService,
    batches: Sequence[Sequence[NewEvent]],
) -> list[AppendResult]:
    """Add the rows of several requests; a result for each, with indices into its batch."""
    # First of all the lock: what is looked up below then stays true until the commit.
    first = await next_values(conn, EVENT_SEQ, 0)
    rows = [event for batch in batches for event in batch]
    stored = await repository.stored(conn, [event.event_id for event in rows])
    users = await repository.user_ids(conn, {event.user for event in rows})
    known_items: dict[str, int] = {}
    if stored:
        known_items = await catalog.ids_of(
            {event.item for event in rows if event.event_id in stored}, conn
        )

    fresh: dict[str, NewEvent] = {}
    seqs: dict[str, int] = {}
    results = []
    for batch in batches:
        result = AppendResult()
        assigned = repeated = 0
        for index, event in enumerate(batch):
            event_id = event.event_id
            before = stored.get(event_id)
            if before is not None:
                seq = before.seq
                same = (
                    before.user_id == users.get(event.user)
                    and before.item_id == known_items.get(event.item)
                    and _same_content(event, before)
                )
            elif (earlier := fresh.get(event_id)) is not None:
                seq = seqs[event_id]
                same = (
                    earlier.user == event.user
                    and earlier.item == event.item
                    and _same_content(event, earlier)
                )
            else:
                assigned = seqs[event_id] = first + len(fresh)
                fresh[event_id] = event
                result.accepted += 1
                continue
            if same:
                result.duplicates += 1
                repeated = max(repeated, seq)
            else:
                result.rejected.append(Rejection(index, "event_id_conflict", _CONFLICT))
        result.last_seq = assigned or repeated or first + len(fresh) - 1
        results.append(result)

    if fresh:
        new = fresh.values()
        # Only now, so that rows that are not taken leave no users and items behind.
        # In the order of the events: the same events make the same rows, and the same model.
        missing = [u for u in dict.fromkeys(event.user for event in new) if u not in users]
        if missing:
            users.update(await repository.create_users(conn, missing))
        items = await catalog.ensure_items(conn, list(dict.fromkeys(e.item for e in new)))
        await next_values(conn, EVENT_SEQ, len(fresh))
        await repository.insert(
            conn,
            [
                StoredEvent(
                    seq,
                    event.event_id,
                    users[event.user],
                    items[event.item],
                    event.type,
                    event.value,
                    event.timestamp,
                    event.recommendation_id,
                )
                for seq, event in enumerate(new, first)
            ],
        )
    return results


def _same_content(event: NewEvent, before: NewEvent | StoredEvent) -> bool:
    return (
        before.type == event.type
        and before.value == event.value
        and before.recommendation_id == event.recommendation_id
        # A retry that leaves the time to the service cannot name the time of the first attempt.
        and (not event.timestamp_given or before.timestamp == event.timestamp)
    )
