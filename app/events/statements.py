"""The queries on users and events that are more than a line, made once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from app.core.metadata import CATALOG_SEQ, EVENT_SEQ, current_value
from app.events.feedback import Feedback
from app.events.tables import events, preferences, retractions, users, when

COUNTERS = sa.select(current_value(EVENT_SEQ), current_value(CATALOG_SEQ))
USERS_SINCE = sa.union(
    *(
        sa.select(users.c.external_id)
        .join(table, table.c.user_id == users.c.id)
        .where(table.c.seq > sa.bindparam("seq", type_=sa.BigInteger))
        for table in (events, preferences)
    )
)
ROWS_SINCE = sa.select(
    *(
        sa.select(sa.func.count())
        .select_from(table)
        .where(table.c.seq > sa.bindparam("seq", type_=sa.BigInteger))
        .scalar_subquery()
        for table in (events, retractions, preferences)
    )
)
RETRACTED_SINCE = sa.select(retractions.c.user_id).where(
    retractions.c.seq > sa.bindparam("seq", type_=sa.BigInteger)
)


def popularity_statement(feedback: Feedback) -> sa.Select[Any]:
    """Items and the numbers of their users: all of them, less those without a positive event.

    All are counted in an index alone. To look at the type of each event takes twenty times as long
    as that, and few are not positive.
    """
    count = sa.func.count(events.c.user_id.distinct()).label("n")
    every = sa.select(events.c.item_id, count).group_by(events.c.item_id)
    if feedback.all_positive:
        return every
    # Plus 0, or SQLite goes through an index to meet equal ones together, and looks up every event.
    others = (
        sa.select((events.c.item_id + 0).label("item_id"), events.c.user_id)
        .where(sa.not_(feedback.is_positive(events.c.type, events.c.value)))
        .distinct()
        .subquery()
    )
    same = events.alias()
    lost = (
        sa.select(others.c.item_id, sa.func.count().label("n"))
        .where(
            ~sa.exists().where(
                same.c.item_id == others.c.item_id,
                same.c.user_id == others.c.user_id,
                feedback.is_positive(same.c.type, same.c.value),
            )
        )
        .group_by(others.c.item_id)
        .subquery()
    )
    all_users = every.subquery()
    left = all_users.c.n - sa.func.coalesce(lost.c.n, 0)
    return (
        sa.select(all_users.c.item_id, left)
        .select_from(all_users.outerjoin(lost, lost.c.item_id == all_users.c.item_id))
        .where(left > 0)
    )


def profile_statement(dialect: str, feedback: Feedback) -> sa.Select[Any]:
    """Everything that a recommendation asks of a user, as one row, also for an unknown user.

    Lists come as JSON, which is quicker to read than the driver's arrays.
    """
    weight = feedback.expression(events.c.type, events.c.value).label("weight")
    own = sa.select(events.c.item_id, events.c.seq, when(), weight)
    stated = sa.select(
        preferences.c.winner_id, preferences.c.loser_id, preferences.c.seq, preferences.c.timestamp
    )
    lists = [
        _lists(dialect, own.where(events.c.user_id == users.c.id).order_by(events.c.seq)),
        _lists(
            dialect, stated.where(preferences.c.user_id == users.c.id).order_by(preferences.c.seq)
        ),
    ]
    one = sa.select(
        current_value(EVENT_SEQ).label("event_seq"), current_value(CATALOG_SEQ).label("catalog_seq")
    ).subquery()
    return sa.select(one, users.c.id, users.c.last_seq, *lists).select_from(
        one.outerjoin(users, users.c.external_id == sa.bindparam("user", type_=sa.Text))
    )


def _lists(dialect: str, rows: sa.Select[Any]) -> sa.ScalarSelect[Any]:
    """The columns of some rows of a user's, each as a list: a list of lists, as JSON."""
    ordered = rows.correlate(users).subquery()
    text: sa.ColumnElement[Any]
    if dialect == "sqlite":
        text = sa.func.json_array(*(sa.func.json_group_array(column) for column in ordered.c))
    else:
        # PostgreSQL takes twice as long to build JSON, and the driver to read arrays.
        joined = (
            sa.func.coalesce(sa.func.array_to_string(sa.func.array_agg(column), ","), "")
            for column in ordered.c
        )
        text = sa.func.concat("[[", *_between(joined, "],["), "]]")
    return sa.select(text).correlate(users).scalar_subquery()


def _between(parts: Iterable[Any], separator: str) -> list[Any]:
    return [each for part in parts for each in (separator, part)][1:]
