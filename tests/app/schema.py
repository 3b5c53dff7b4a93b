"""What a database's schema is, beside what the tables say."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from app.all_tables import metadata
from app.core.database import Database


async def differences(database: Database) -> list[Any]:
    """What a migration would have to change; nothing, where they agree."""

    def compare(conn: sa.Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(conn, opts=options)
        found: list[Any] = compare_metadata(context, metadata)
        return found

    async with database.read() as conn:
        return await conn.run_sync(compare)
