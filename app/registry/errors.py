"""Errors that tell a client why a version cannot be activated."""

from __future__ import annotations

from app.core.errors import AppError, Conflict, Unavailable
from ncr_core.errors import CheckpointError, CheckpointReadError


def checkpoint_unusable(error: CheckpointError) -> AppError:
    """503 if another try may read the checkpoint, else 409."""
    if isinstance(error, CheckpointReadError):
        return Unavailable(str(error), code="store_unavailable", retry_after=10)
    return Conflict(str(error), code="checkpoint_damaged")


def version_deleted(version: str) -> Conflict:
    """409 for a version of which retention has kept only the metrics."""
    return Conflict(
        f"the files of {version} were deleted: only its metrics are kept", code="deleted_model"
    )
