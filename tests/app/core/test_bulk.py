"""Many rows at once: COPY and the other ways store the same, on both databases."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError, IntegrityError

from app.catalog.service import CatalogService
from app.catalog.tables import items
from app.core import bulk
from app.core.bulk import MIN_COPY_ROWS, insert_many
from app.core.database import Database
from app.core.requests import MAX_ID_BYTES, text_problem
from app.core.settings import load_settings, normalise_database_url
from app.events.schemas import NewEvent
from app.events.service import EventService
from app.events.tables import events, users
from app.wiring import Services
from tests.conftest import ON_POSTGRESQL, POSTGRES_URL

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    # What means something to COPY, to JSON or to SQL.
    st.text(st.sampled_from("\\\t\n\r\b\f\v'\"N.,{}x;\x7f\u2028é😀"), min_size=1),
).filter(lambda text: text_problem(text, MAX_ID_BYTES - 16) is None)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
EVENT = st.builds(
    NewEvent,
    event_id=TEXT,
    user=TEXT,
    item=TEXT,
    type=TEXT.filter(lambda text: text_problem(text, 64) is None),
    value=st.none() | FLOAT | st.sampled_from([-0.0, 1e300, 5e-324]),
    timestamp=st.integers(0, 32_503_679_999_000_000),
    recommendation_id=st.none() | TEXT,
    timestamp_given=st.just(True),
)


def service_of(database: Database, **overrides: Any) -> EventService:
    return EventService(database, CatalogService(database), load_settings(**overrides))


async def stored(database: Database) -> list[NewEvent]:
    """All events, in order, as they were given."""
    joined = events.join(users, users.c.id == events.c.user_id)
    names = (users.c.external_id.label("user"), items.c.external_id.label("item"))
    rows = await database.fetch(
        sa.select(*events.c, *names)
        .select_from(joined.join(items, items.c.id == events.c.item_id))
        .order_by(events.c.seq)
    )
    return [
        NewEvent(
            row.event_id,
            row.user,
            row.item,
            row.type,
            row.value,
            row.timestamp,
            row.recommendation_id,
        )
        for row in rows
    ]


def columns_of(rows: list[NewEvent]) -> pa.RecordBatch:
    kinds = {"value": pa.float64(), "timestamp": pa.int64(), "timestamp_given": pa.bool_()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in NewEvent._fields])
    return pa.RecordBatch.from_pylist([row._asdict() for row in rows], schema)


@pytest.mark.parametrize("way", ["columns", "copy", "insert"])
@pytest.mark.slow
def test_imported_rows_are_stored_unchanged(
    way: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MIN_COPY_ROWS", 1 if way == "copy" else 1_000_000)

    database = Database(normalise_database_url(database_url))
    service = service_of(database)

    async def round_trip(rows: list[NewEvent]) -> list[NewEvent]:
        if way == "columns":
            result = await service.import_new(columns_of(rows), {})
        else:
            result = await service.import_rows(rows)
        assert (result.accepted, result.duplicates, result.conflicts) == (len(rows), 0, 0)
        found = await stored(database)
        async with database.write() as conn:
            for table in (events, users):
                await conn.execute(table.delete())
        return found

    with asyncio.Runner() as runner:

        @settings(
            max_examples=40,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(st.lists(EVENT, min_size=1, max_size=8, unique_by=lambda event: event.event_id))
        def check(rows: list[NewEvent]) -> None:
            found = runner.run(round_trip(rows))
            assert found == rows
            if database.dialect == "postgresql":  # SQLite keeps no sign of zero
                assert list(map(bits, found)) == list(map(bits, rows))

        try:
            check()
        finally:
            runner.run(database.close())


def bits(event: NewEvent) -> bytes | None:
    return None if event.value is None else struct.pack("d", event.value)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Which tables got how many rows by COPY."""
    seen: list[tuple[str, int]] = []
    by_copy = bulk._copy

    async def recording(conn: Any, table: sa.Table, columns: Any, rows: Any) -> None:
        seen.append((table.name, len(rows)))
        await by_copy(conn, table, columns, rows)

    monkeypatch.setattr(bulk, "_copy", recording)
    return seen


@pytest.mark.anyio
async def test_copy_and_insert_give_the_same_results(
    services: Services, copied: list[tuple[str, int]]
) -> None:
    n = MIN_COPY_ROWS + 500
    early = [NewEvent(f"e{i}", f"u{i}", "i", value=1.0) for i in range(0, n, 100)]
    await services.events.import_rows(early)
    assert copied == []
    rows = [NewEvent(f"e{i}", f"u{i}", "i", value=1.0) for i in range(n)]
    again = [NewEvent(f"e{i}", f"u{i}", "i", value=1.0) for i in range(50)]
    others = [NewEvent(f"e{i}", f"u{i}", "i", value=2.0) for i in range(30)]
    result = await services.events.import_rows([*rows, *again, *others])
    assert result.accepted == n - len(early)
    assert result.duplicates == len(early) + len(again)
    assert result.conflicts == len(others)
    assert await services.events.last_seq() == n
    assert [event.event_id for event in await stored(services.events._database)] == [
        *(event.event_id for event in early),
        *(f"e{i}" for i in range(n) if i % 100),
    ]
    # The last seq of each user moved on with their events.
    profile = await services.events.profiles.get(f"u{n - 1}")
    assert (profile.last_seq, profile.seqs.tolist()) == (n, [n])
    for again_all in (
        await services.events.import_rows(rows),
        await services.events.import_new(columns_of(rows), {}),
    ):
        assert (again_all.accepted, again_all.duplicates) == (0, n)
    if services.database.dialect == "postgresql":
        assert copied[:2] == [("users", n - len(early)), ("events", n - len(early))]
    else:
        assert copied == []


NEW_USERS = [(f"u{i}", 0) for i in range(MIN_COPY_ROWS)]


async def count_users(database: Database) -> int:
    return int((await database.fetch(sa.text("SELECT count(*) FROM users")))[0][0])


@pytest.mark.anyio
@ON_POSTGRESQL
async def test_an_error_in_copy_is_a_database_error(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as conn:
            await insert_many(conn, users, ("external_id", "created_at"), [*NEW_USERS, ("u7", 1)])
    assert await count_users(database) == 0
    async with database.write() as conn:
        await insert_many(conn, users, ("external_id", "created_at"), NEW_USERS)
        # COPY is part of the transaction.
        await conn.rollback()
    assert await count_users(database) == 0
    async with database.write() as conn:
        await insert_many(conn, users, ("external_id", "created_at"), NEW_USERS)
    assert await count_users(database) == MIN_COPY_ROWS


@pytest.mark.anyio
@ON_POSTGRESQL
async def test_a_connection_that_ends_in_copy_is_replaced(database: Database) -> None:
    class Ending(list[tuple[str, int]]):
        """Rows, in the midst of which the server ends the connection."""

        pid = 0

        def __iter__(self) -> Iterator[tuple[str, int]]:
            for number, row in enumerate(super().__iter__()):
                if number == len(self) // 2:
                    with psycopg.connect(POSTGRES_URL, autocommit=True) as admin:
                        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (self.pid,))
                yield row

    async def interrupted() -> None:
        async with database.write() as conn:
            await insert_many(conn, users, ("external_id", "created_at"), NEW_USERS)
            more = Ending((f"more{i}", 0) for i in range(100_000))
            more.pid = (await conn.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
            await insert_many(conn, users, ("external_id", "created_at"), more)

    with pytest.raises(DBAPIError) as caught:
        await interrupted()
    # What the group commit takes for a database that is away: 503, and try again.
    assert caught.value.connection_invalidated
    assert await count_users(database) == 0
