"""Every table of every feature, in one MetaData: for Alembic and for tests, not for queries."""

from __future__ import annotations

import app.catalog.tables
import app.events.tables
import app.jobs.tables
import app.keys.tables
import app.models.tables
import app.trials.tables  # noqa: F401
from app.core.metadata import metadata

__all__ = ["metadata"]
