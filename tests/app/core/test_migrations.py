"""The schema's versions."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from app.core.database import Database
from app.core.errors import SettingsError
from app.core.migrations import (
    current_revision,
    ensure_schema,
    head_revision,
    migrate,
    schema_is_current,
)
from tests.app.schema import differences

pytestmark = pytest.mark.anyio


async def test_migrations_create_the_declared_tables(database: Database) -> None:
    assert await differences(database) == []
    assert await current_revision(database) == head_revision()


async def test_downgrade_and_upgrade_again(empty: Database) -> None:
    assert await current_revision(empty) is None
    await migrate(empty)
    assert await schema_is_current(empty)
    await migrate(empty, "base")
    assert await current_revision(empty) is None
    await migrate(empty)
    await migrate(empty)
    assert await differences(empty) == []


async def test_concurrent_migrations_are_safe(empty: Database) -> None:
    url = empty.url.render_as_string(hide_password=False)
    others = [Database(url) for _ in range(6)]
    await asyncio.gather(*(migrate(other) for other in others))
    for other in others:
        await other.close()
    assert await schema_is_current(empty)


async def test_ensure_schema_migrates_sqlite_only(empty: Database) -> None:
    if empty.dialect == "sqlite":
        await ensure_schema(empty)
        assert await schema_is_current(empty)
    else:
        with pytest.raises(SettingsError, match="run `ncr db upgrade`"):
            await ensure_schema(empty)


async def test_a_newer_schema_is_refused(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SettingsError, match="newer"):
        await ensure_schema(database)
