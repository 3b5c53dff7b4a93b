"""Stated preferences: the transaction that appends them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.tables import EVENT_SEQ, next_values
from app.events.repository import EventRepository
from app.events.schemas import AppendResult, NewPreference, Rejection, StoredPreference


async def append_preferences(
    conn: AsyncConnection,
    repository: EventRepository,
    catalog: CatalogService,
    rows: Sequence[NewPreference],
    deleted: Collection[int],
    *,
    skip_stored: bool = False,
) -> AppendResult:
    """Append preferences in the caller's transaction. Unknown users are created, items are not.

    Args:
        conn: the transaction.
        repository: stores the rows.
        catalog: knows the items.
        rows: valid preferences; those about unknown or deleted items are rejected.
        deleted: internal ids of deleted items.
        skip_stored: counts preferences that were stored before as duplicates.
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
            detail = f"there is no item {unknown[:64]!r}"
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
