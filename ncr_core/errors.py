"""The errors of ncr_core for its callers. Each message is one line for a user."""

from __future__ import annotations

from typing import Any


class NcrError(Exception):
    """The base of all errors of ncr_core; a user can read the message and act on it."""


class DataError(NcrError):
    """The given data, such as interactions, cannot be read, used or learned from."""


class ConfigError(NcrError):
    """A model or training configuration that does not fit (sizes, α, device …)."""


class CheckpointError(NcrError):
    """A checkpoint that is missing, damaged, or of another format."""


class CheckpointReadError(CheckpointError):
    """A checkpoint that could not be read but may be whole: another try may succeed."""


class StoreUnavailable(CheckpointReadError):  # noqa: N818 - named after the HTTP error
    """A store that could not be used; its files may be whole."""


class TrainingError(NcrError):
    """Training could not continue, for example because the loss became NaN.

    ``model`` is the model at its best epoch, and ``history`` the history of its training. Both are
    None if no epoch was good.
    """

    def __init__(self, message: str, model: Any = None, history: Any = None) -> None:
        super().__init__(message)
        self.model = model
        self.history = history


_OF_DEVICE_MEMORY = ("out of memory", "outofmemory", "alloc_failed", "device_allocation_failed")
_OF_HOST_MEMORY = (
    "memoryerror",
    "allocate memory",
    "unable to allocate",
    "not enough memory",
    "low on memory",
    "high memory usage",
    "bad_alloc",
    "host_allocation_failed",
)


def lacks_device_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU lacks memory.

    torch and the libraries of CUDA have several errors for it, of several types.
    """
    text = f"{type(error).__name__} {error}".lower()
    return any(words in text for words in _OF_DEVICE_MEMORY)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that the machine or a GPU lacks memory.

    The error may be one of Ray's, whose text has that of the rank.
    """
    if isinstance(error, MemoryError) or lacks_device_memory(error):
        return True
    text = str(error).lower()
    return any(words in text for words in _OF_HOST_MEMORY)
