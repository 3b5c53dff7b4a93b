"""Run by Alembic, always on the connection and in the transaction of app.core.migrations."""

from __future__ import annotations

from alembic import context

from app.all_tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
