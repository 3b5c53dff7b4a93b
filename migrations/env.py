"""Run by Alembic, always on the connection of app.core.migrations.

On SQLite it is in a transaction; on PostgreSQL each migration is one.
"""

from __future__ import annotations

from alembic import context

from app.all_tables import metadata
from app.core.migrations import record_compatibility

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    transaction_per_migration=True,
    on_version_apply=lambda ctx, heads, **_: record_compatibility(ctx.connection, heads),
)
with context.begin_transaction():
    context.run_migrations()
