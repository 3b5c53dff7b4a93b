"""Queries on items that are newer than the model: their positive events and their adopters.

A user has adopted an item if the user's latest event about the item with a non-zero weight is
positive. The rule is that of `app.events.profile.resolve_feedback`, in SQL. Only known users count.
A known user has an event or preference up to ``known_by``, the last seq that the model was trained
on. The model has no vector for other users.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from app.core.bulk import one_of
from app.core.database import Database
from app.events.event_weights import EventWeights
from app.events.schemas import Adoption
from app.events.tables import event_time, events, preferences, users


class AdopterRepository:
    """Reads usage and adopters of new items."""

    def __init__(self, database: Database, event_weights: EventWeights) -> None:
        self._database = database
        self._event_weights = event_weights
        self._usage = _usage_statement(event_weights)

    async def new_item_usage(
        self, seq: int, known_by: int, limit: int
    ) -> list[tuple[int, int, int]]:
        """Count the events of known users by item, among the next ``limit`` positive events.

        Returns:
            ``(item, events of known users, last seq)`` for each item of the first ``limit``
            positive events after ``seq``.
        """
        parameters = {"seq": seq, "known_by": known_by, "limit": limit}
        rows = await self._database.fetch(self._usage, parameters)
        return [(row[0], int(row[1]), row[2]) for row in rows]

    async def adopters(
        self, items: Collection[int], known_by: int, max_users: int
    ) -> list[Adoption]:
        """Return the latest ``max_users`` known adopters of each item, by ``Adoption.last_seq``."""
        is_item = one_of(events.c.item_id, items, self._database.dialect)
        rows = await self._database.fetch(
            _adopters_statement(is_item, self._event_weights),
            {"known_by": known_by, "max_users": max_users},
        )
        return [Adoption(*row) for row in rows]


def _is_by_known_user() -> sa.ColumnElement[bool]:
    """Return whether an event's user has an event or preference up to ``known_by``."""
    known_by = sa.bindparam("known_by", type_=sa.BigInteger)
    return sa.or_(
        *(
            sa.exists().where(table.c.user_id == events.c.user_id, table.c.seq <= known_by)
            for table in (events.alias(), preferences.alias())
        )
    )


def _usage_statement(event_weights: EventWeights) -> sa.Select[Any]:
    usage = (
        sa.select(
            events.c.seq,
            events.c.item_id,
            sa.case((_is_by_known_user(), 1), else_=0).label("known"),
        )
        .where(
            events.c.seq > sa.bindparam("seq", type_=sa.BigInteger),
            event_weights.is_positive(events.c.type, events.c.value),
        )
        .order_by(events.c.seq)
        .limit(sa.bindparam("limit", type_=sa.Integer))
        .subquery()
    )
    return sa.select(
        usage.c.item_id, sa.func.sum(usage.c.known), sa.func.max(usage.c.seq)
    ).group_by(usage.c.item_id)


def _adopters_statement(
    is_item: sa.ColumnElement[bool], event_weights: EventWeights
) -> sa.Select[Any]:
    weight = event_weights.expression(events.c.type, events.c.value).label("weight")
    columns = (events.c.item_id, events.c.user_id, event_time(), events.c.seq, weight)
    feedback = sa.select(*columns).where(is_item, _is_by_known_user()).subquery()
    latest_first: dict[str, Any] = {
        "partition_by": (feedback.c.item_id, feedback.c.user_id),
        "order_by": (feedback.c.timestamp.desc(), feedback.c.seq.desc()),
    }
    with_latest = (
        sa.select(
            *feedback.c,
            sa.func.first_value(feedback.c.weight).over(**latest_first).label("latest_weight"),
            sa.func.first_value(feedback.c.seq).over(**latest_first).label("latest_seq"),
        )
        .where(feedback.c.weight != 0)
        .subquery()
    )
    # Among equal weights the newest decays least: one row a weight, however often it was repeated.
    group = (
        with_latest.c.item_id,
        with_latest.c.user_id,
        with_latest.c.latest_seq,
        with_latest.c.weight,
    )
    liked = (
        sa.select(*group, sa.func.max(with_latest.c.timestamp).label("timestamp"))
        .where(with_latest.c.latest_weight > 0, with_latest.c.weight > 0)
        .group_by(*group)
        .subquery()
    )
    rank = sa.func.dense_rank().over(
        partition_by=liked.c.item_id, order_by=liked.c.latest_seq.desc()
    )
    ranked = sa.select(*liked.c, rank.label("rank")).subquery()
    return (
        sa.select(
            ranked.c.item_id,
            users.c.external_id,
            ranked.c.latest_seq,
            ranked.c.weight,
            ranked.c.timestamp,
        )
        .join(users, users.c.id == ranked.c.user_id)
        .where(ranked.c.rank <= sa.bindparam("max_users", type_=sa.Integer))
        .order_by(ranked.c.latest_seq)
    )
