"""Click attribution: the lists that led to positive events.

An event names its list by a ``recommendation_id``. The id begins with the source of the list (a
model version or an A/B test) and the hour, see `app.core.ids`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import sqlalchemy as sa

from app.core.database import Database
from app.core.ids import (
    HOUR_MS,
    bounds,
    first_of,
    from_source,
    is_from,
    is_of,
    last_of,
)
from app.events.event_weights import EventWeights
from app.events.tables import events, users

PAGE_ROWS = 2_000  # more than the items of one list, and few enough not to hold up requests
MAX_MICROSECONDS = 2**63 - 1


class ClickAttribution:
    """Counts clicked lists. A click is an event with a positive weight."""

    def __init__(self, database: Database, event_weights: EventWeights) -> None:
        self._database = database
        self._is_positive = event_weights.is_positive(events.c.type, events.c.value)

    async def clicked(self, source: str) -> int:
        """Return the number of a source's lists with at least one click."""
        list_id = events.c.recommendation_id
        rows = await self._database.fetch(
            sa.select(sa.func.count(list_id.distinct())).where(
                from_source(list_id, source), self._is_positive
            )
        )
        return int(rows[0][0])

    async def clicked_by_hour(
        self, source: str, hours: Sequence[int], within: int | None = None
    ) -> dict[int, int]:
        """Return the number of clicked lists by the hour of serving.

        Args:
            source: the source of the lists, a model version or an A/B test.
            hours: hours since 1970, UTC. The result leaves out hours without clicks.
            within: the number of hours, after the end of a list's hour, in which clicks count;
                None: clicks count at any time.
        """
        if not hours:
            return {}
        spans = sa.values(
            sa.column("hour", sa.BigInteger),
            sa.column("first_id", sa.Text),
            sa.column("end_id", sa.Text),
            sa.column("deadline", sa.BigInteger),
        ).data([(hour, *bounds(source, hour), _deadline(hour, within)) for hour in hours])
        # A common table expression: SQLite names the columns of VALUES only there.
        span, list_id = spans.cte("spans"), events.c.recommendation_id
        # A subquery per hour, so that each is one range scan of the index.
        clicked = (
            sa.select(sa.func.count(list_id.distinct()))
            .where(list_id >= span.c.first_id, list_id < span.c.end_id, is_of(list_id, source))
            .where(events.c.created_at < span.c.deadline, self._is_positive)
            .scalar_subquery()
        )
        rows = await self._database.fetch(sa.select(span.c.hour, clicked))
        return {hour: count for hour, count in rows if count}

    async def clicked_by_user(self, source: str) -> dict[str, int]:
        """Return the number of a source's lists that each user has clicked, by the client's id."""
        list_id = events.c.recommendation_id
        rows = await self._database.fetch(
            sa.select(users.c.external_id, sa.func.count(list_id.distinct()))
            .join(users, users.c.id == events.c.user_id)
            .where(from_source(list_id, source), self._is_positive)
            .group_by(users.c.external_id)
        )
        return {row[0]: row[1] for row in rows}

    async def clicks(self, source: str) -> AsyncIterator[dict[str, set[int]]]:
        """Yield the clicked items of a source's lists, at most ``PAGE_ROWS`` rows at a time.

        Yields:
            Internal item ids by recommendation id. No list is split between two results.
        """
        list_id = events.c.recommendation_id
        query = (
            # Distinct: an item of a list may have been clicked any number of times.
            sa.select(list_id, events.c.item_id)
            .distinct()
            # Keyset pagination on the index: no page sorts or reads what is not its own.
            .where(list_id > sa.bindparam("after"), list_id < last_of(source), self._is_positive)
            .order_by(list_id)
            .limit(PAGE_ROWS)
        )
        after = first_of(source)
        while rows := await self._database.fetch(query, {"after": after}):
            items: dict[str, set[int]] = {}
            for name, item in rows:
                items.setdefault(name, set()).add(item)
            if len(rows) == PAGE_ROWS and len(items) > 1:
                items.popitem()  # may go on in the next page, which reads it whole
            after = next(reversed(items))
            yield {name: clicked for name, clicked in items.items() if is_from(name, source)}


def _deadline(hour: int, within: int | None) -> int:
    """Return the end of the ``within`` hours after an hour, in microseconds since 1970."""
    return MAX_MICROSECONDS if within is None else (hour + 1 + within) * HOUR_MS * 1_000
