"""What keys are good for."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a key is good for."""

    READ = "read"
    """To ask: recommendations, items, users' histories, metrics, documentation."""
    INGEST = "ingest"
    """To tell: events and items."""
    ADMIN = "admin"
    """All of it, and training, models, and the erasure of users."""
