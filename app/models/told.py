"""What a client is told of versions that cannot be served."""

from __future__ import annotations

from app.core.errors import AppError, Conflict, Unavailable
from ncr_core.errors import CheckpointError, CheckpointReadError


def told_of(error: CheckpointError) -> AppError:
    """503 where another try may read it, else 409."""
    if isinstance(error, CheckpointReadError):
        return Unavailable(str(error), code="store_unavailable", retry_after=10)
    return Conflict(str(error), code="checkpoint_damaged")


def deleted(version: str) -> Conflict:
    """The answer about a version of which the rule of retention has left the figures alone."""
    return Conflict(
        f"the files of {version} were removed: only its figures are kept", code="deleted_model"
    )
