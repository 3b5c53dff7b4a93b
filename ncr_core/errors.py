"""The errors of ncr_core on what a caller gives it. Each message is one line for a user."""

from __future__ import annotations


class NcrError(Exception):
    """The root of the tree: something a user can read and act on."""


class DataError(NcrError):
    """The interactions given cannot be read or cannot be learned from."""


class ConfigError(NcrError):
    """A model or training configuration that does not fit (sizes, α, device …)."""


class CheckpointError(NcrError):
    """A checkpoint that is missing, damaged, or not one of ours."""


class TrainingError(NcrError):
    """Training could not go on, for example because the loss became NaN."""
