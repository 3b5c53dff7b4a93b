"""Which lists led to something: events by the recommendation id that they give back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import sqlalchemy as sa

from app.core.attribution import (
    HOUR_MS,
    bounds,
    first_of,
    from_source,
    is_from,
    is_of,
    last_of,
)
from app.core.database import Database
from app.events.feedback import Feedback
from app.events.tables import events

PAGE_ROWS = 2_000  # more than a list has clicks, and few enough not to hold up requests


class Attribution:
    """Counts as clicks the events that the service's feedback takes for positive."""

    def __init__(self, database: Database, feedback: Feedback) -> None:
        self._database = database
        self._positive = feedback.is_positive(events.c.type, events.c.value)

    def _clicks(self, source: str) -> sa.ColumnElement[bool]:
        return from_source(events.c.recommendation_id, source) & self._positive

    async def clicked(self, source: str) -> int:
        """How many lists from a source were clicked: each counts once."""
        rows = await self._database.fetch(
            sa.select(sa.func.count(events.c.recommendation_id.distinct())).where(
                self._clicks(source)
            )
        )
        return int(rows[0][0])

    async def clicked_by_hour(
        self, source: str, hours: Sequence[int], within: int | None = None
    ) -> dict[int, int]:
        """How many lists that were given out in each of these hours were clicked; with ``within``,
        by events that came at most so many hours after the hour.
        """
        if not hours:
            return {}
        spans = sa.values(
            sa.column("hour", sa.BigInteger),
            sa.column("first", sa.Text),
            sa.column("after", sa.Text),
            sa.column("until", sa.BigInteger),
        ).data([(hour, *bounds(source, hour), _until(hour, within)) for hour in hours])
        # As a table of its own: SQLite names the columns only of those.
        each, name = spans.cte("spans"), events.c.recommendation_id
        # For each hour by itself, so that the index finds its own lists and no others.
        clicked = (
            sa.select(sa.func.count(name.distinct()))
            .where(name >= each.c.first, name < each.c.after, is_of(name, source))
            .where(events.c.created_at < each.c.until, self._positive)
            .scalar_subquery()
        )
        rows = await self._database.fetch(sa.select(each.c.hour, clicked))
        return {row[0]: row[1] for row in rows if row[1]}

    async def clicks(self, source: str) -> AsyncIterator[dict[str, set[int]]]:
        """Lists from a source with their clicked items, some thousand at a time."""
        name = events.c.recommendation_id
        query = (
            sa.select(name, events.c.item_id)
            # By the index alone, from where it has got to: nothing is sorted or read twice.
            .where(name > sa.bindparam("after"), name < last_of(source), self._positive)
            .order_by(name)
            .limit(PAGE_ROWS)
        )
        after = first_of(source)
        while rows := await self._database.fetch(query, {"after": after}):
            found: dict[str, set[int]] = {}
            for own, item in rows:
                found.setdefault(own, set()).add(item)
            if len(rows) == PAGE_ROWS and len(found) > 1:
                found.popitem()  # it may go on: it comes whole the next time
            after = next(reversed(found))
            yield {own: items for own, items in found.items() if is_from(own, source)}


def _until(hour: int, within: int | None) -> int:
    """The end of so many hours after this one, in microseconds; without a bound, of all time."""
    return 2**63 - 1 if within is None else (hour + 1 + within) * HOUR_MS * 1_000
