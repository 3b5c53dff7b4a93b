"""The errors of ncr_core on what a caller gives it. Each message is one line for a user."""

from __future__ import annotations

from typing import Any


class NcrError(Exception):
    """The root of the tree: something a user can read and act on."""


class DataError(NcrError):
    """The interactions given cannot be read or cannot be learned from."""


class ConfigError(NcrError):
    """A model or training configuration that does not fit (sizes, α, device …)."""


class CheckpointError(NcrError):
    """A checkpoint that is missing, damaged, or not one of ours."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that could not be read: it may be whole, and another try may read it."""


class StoreUnavailable(CheckpointReadError):  # noqa: N818 - named after the HTTP error
    """A store could not be used, which says nothing about the files in it."""


class TrainingError(NcrError):
    """Training could not go on, for example because the loss became NaN.

    ``model`` and ``history`` are what was being trained, set back to its best epoch, where at least
    one epoch was good; else None.
    """

    def __init__(self, message: str, model: Any = None, history: Any = None) -> None:
        super().__init__(message)
        self.model = model
        self.history = history
