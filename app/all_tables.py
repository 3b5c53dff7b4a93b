"""All tables of all features in one MetaData, for Alembic and for tests; not for queries."""

from __future__ import annotations

import app.ab_tests.tables
import app.catalog.tables
import app.events.tables
import app.jobs.tables
import app.keys.tables
import app.registry.tables
import app.webhooks.tables  # noqa: F401
from app.core.tables import metadata

__all__ = ["metadata"]
