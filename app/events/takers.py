"""Who took items up: the queries behind the vectors of new items."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa

from app.events.feedback import Feedback
from app.events.tables import events, preferences, users, when


class Taking(NamedTuple):
    """That a user took an item up, and that it stands: their last word about it is positive."""

    item: int
    user: str
    """The client's id."""
    last_seq: int
    """The seq of the last word."""
    weight: float
    """Of one of their positive events about it; there is a row for each weight."""
    timestamp: int
    """Of the latest event of that weight."""


def _were_there() -> sa.ColumnElement[bool]:
    """Whether an event's user had done or said something up to ``known_by``."""
    known_by = sa.bindparam("known_by", type_=sa.BigInteger)
    mine, said = events.alias(), preferences.alias()
    return sa.or_(
        *(
            sa.exists().where(table.c.user_id == events.c.user_id, table.c.seq <= known_by)
            for table in (mine, said)
        )
    )


def met_statement(feedback: Feedback) -> sa.Select[Any]:
    """As `EventRepository.met`."""
    met = (
        sa.select(
            events.c.seq,
            events.c.item_id,
            sa.case((_were_there(), 1), else_=0).label("known"),
        )
        .where(
            events.c.seq > sa.bindparam("seq", type_=sa.BigInteger),
            feedback.is_positive(events.c.type, events.c.value),
        )
        .order_by(events.c.seq)
        .limit(sa.bindparam("limit", type_=sa.Integer))
        .subquery()
    )
    return sa.select(met.c.item_id, sa.func.sum(met.c.known), sa.func.max(met.c.seq)).group_by(
        met.c.item_id
    )


def takers_statement(these: sa.ColumnElement[bool], feedback: Feedback) -> sa.Select[Any]:
    """As `EventRepository.takers`; the rule is that of `verdicts`: of a user's events about an item
    the latest whose weight is not 0 says whether it is liked."""
    weight = feedback.expression(events.c.type, events.c.value).label("weight")
    columns = (events.c.item_id, events.c.user_id, when(), events.c.seq, weight)
    said = sa.select(*columns).where(these, _were_there()).subquery()
    latest_first: dict[str, Any] = {
        "partition_by": (said.c.item_id, said.c.user_id),
        "order_by": (said.c.timestamp.desc(), said.c.seq.desc()),
    }
    words = (
        sa.select(
            *said.c,
            sa.func.first_value(said.c.weight).over(**latest_first).label("last_word"),
            sa.func.first_value(said.c.seq).over(**latest_first).label("last_seq"),
        )
        .where(said.c.weight != 0)
        .subquery()
    )
    # Of equal weights the newest is the strongest: a row each, however often it was repeated.
    once = (words.c.item_id, words.c.user_id, words.c.last_seq, words.c.weight)
    liked = (
        sa.select(*once, sa.func.max(words.c.timestamp).label("timestamp"))
        .where(words.c.last_word > 0, words.c.weight > 0)
        .group_by(*once)
        .subquery()
    )
    place = sa.func.dense_rank().over(
        partition_by=liked.c.item_id, order_by=liked.c.last_seq.desc()
    )
    placed = sa.select(*liked.c, place.label("place")).subquery()
    return (
        sa.select(
            placed.c.item_id,
            users.c.external_id,
            placed.c.last_seq,
            placed.c.weight,
            placed.c.timestamp,
        )
        .join(users, users.c.id == placed.c.user_id)
        .where(placed.c.place <= sa.bindparam("most", type_=sa.Integer))
        .order_by(placed.c.last_seq)
    )
