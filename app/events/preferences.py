"""Stated preferences on the way in: one item rather than another, as a user said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.service import CatalogService
from app.core.http import Id
from app.core.metadata import EVENT_SEQ, next_values
from app.events.repository import EventRepository
from app.events.schemas import (
    AppendResult,
    Moment,
    NewPreference,
    RejectedRow,
    Rejection,
    StoredPreference,
    parse_timestamp,
    text_rejection,
)

_FIELDS = frozenset(("user", "winner", "loser", "timestamp"))


class PreferenceIn(BaseModel):
    """What a user said. Documentation only: rows are checked one by one, see `parse_preference`."""

    model_config = {"extra": "forbid"}

    user: Id
    winner: Id = Field(description="The item that the user would rather have.")
    loser: Id
    timestamp: Moment = None


class PreferenceAnswer(BaseModel):
    """Where a stated preference stands in the order of everything that happened."""

    seq: int


class PreferencesAnswer(BaseModel):
    """The verdict on the rows of a list."""

    accepted: int
    rejected: list[RejectedRow]
    last_seq: int


def parse_preference(row: Any, index: int, now: int) -> NewPreference | Rejection:
    """Check one row of a request. `now`, in microseconds, is the default of its timestamp."""
    if not isinstance(row, dict):
        return Rejection(index, "invalid_preference", "a preference must be a JSON object")
    if not row.keys() <= _FIELDS:
        name = str(next(key for key in row if key not in _FIELDS))[:64]
        return Rejection(index, "unknown_field", f"there is no field {name!r}")
    for name in ("user", "winner", "loser"):
        if (bad := text_rejection(index, name, row.get(name))) is not None:
            return bad
    if row["winner"] == row["loser"]:
        return Rejection(index, "same_item", "no item is preferred to itself")
    given = row.get("timestamp")
    try:
        timestamp = now if given is None else parse_timestamp(given)
    except ValueError as error:
        return Rejection(index, "invalid_timestamp", str(error))
    return NewPreference(row["user"], row["winner"], row["loser"], timestamp)


async def append_preferences(
    conn: AsyncConnection,
    repository: EventRepository,
    catalog: CatalogService,
    rows: Sequence[NewPreference],
    deleted: Collection[int],
    *,
    once: bool = False,
) -> AppendResult:
    """Add statements whose items exist and are not ``deleted``. Users are created, items not.

    With ``once`` those that are there already are duplicates.
    """
    # First of all the lock, as for events: the two share one order.
    first = await next_values(conn, EVENT_SEQ, 0)
    items = await catalog.ids_of({name for row in rows for name in (row.winner, row.loser)}, conn)
    items = {name: found for name, found in items.items() if found not in deleted}
    result = AppendResult(last_seq=first - 1)
    taken: list[NewPreference] = []
    for index, row in enumerate(rows):
        unknown = next((name for name in (row.winner, row.loser) if name not in items), None)
        if unknown is None:
            taken.append(row)
        else:
            result.rejected.append(
                Rejection(index, "unknown_item", f"there is no item {unknown[:64]!r}")
            )
    if not taken:
        return result
    users = await repository.user_ids(conn, {row.user for row in taken})
    if once:
        known = await repository.stated(conn, set(users.values()))
        # Of several that are equal the first; users who are not there yet have said nothing.
        new = [
            row
            for row in dict.fromkeys(taken)
            if (users.get(row.user), items[row.winner], items[row.loser], row.timestamp)
            not in known
        ]
        result.duplicates = len(taken) - len(new)
        taken = new
        if not taken:
            return result
    missing = [u for u in dict.fromkeys(row.user for row in taken) if u not in users]
    if missing:
        users.update(await repository.create_users(conn, missing))
    await next_values(conn, EVENT_SEQ, len(taken))
    await repository.insert_preferences(
        conn,
        [
            StoredPreference(
                seq, users[row.user], items[row.winner], items[row.loser], row.timestamp
            )
            for seq, row in enumerate(taken, first)
        ],
    )
    result.accepted = len(taken)
    result.last_seq = first + len(taken) - 1
    return result
