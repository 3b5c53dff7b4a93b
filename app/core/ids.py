"""Random ids of requests and of lists, and conditions that find the ids from a source.

One system call fetches the random bytes of many ids. A system call releases Python's lock. Another
thread that computes then takes the lock, and the request has to wait for the lock.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

MAX_BYTES = 8  # of an id
_FETCHED_BYTES = 4096


class _Pool:
    """Random bytes of the system, fetched many at a time. `take` returns each byte once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the fetched bytes: a forked process must not return the same bytes."""
        self._pieces: Iterator[tuple[bytes]] = iter(())

    def take(self) -> bytes:
        """The next ``MAX_BYTES`` bytes. For any thread: one step of the iterator is atomic."""
        piece = next(self._pieces, None)
        while piece is None:
            self._pieces = struct.iter_unpack(f"{MAX_BYTES}s", os.urandom(_FETCHED_BYTES))
            piece = next(self._pieces, None)
        return piece[0]


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.clear)


def random_hex(n: int) -> str:
    """``n`` random bytes, at most ``MAX_BYTES``, as hexadecimal digits.

    The bytes are as unpredictable as those of `os.urandom`.
    """
    return _pool.take()[:n].hex()


_RANDOM_BYTES = 6
_TIME_DIGITS = 11  # of milliseconds since 1970, in hexadecimal: from 2004 up to 2527
HOUR_MS = 3_600_000


def new_recommendation_id(source: str) -> str:
    """A new recommendation id for a list from a source: a model version or a trial."""
    return f"{source}.{time.time_ns() // 1_000_000:x}.{random_hex(_RANDOM_BYTES)}"


def hour_now() -> int:
    """Hours since 1970, UTC."""
    return time.time_ns() // (HOUR_MS * 1_000_000)


def from_source(column: sa.ColumnElement[Any], source: str) -> sa.ColumnElement[bool]:
    """The condition that an id is from a source, in a form that an index serves."""
    return (column > first_of(source)) & (column < last_of(source)) & is_of(column, source)


def first_of(source: str) -> str:
    """A lower bound of the ids from a source, in any collation; `last_of` is the upper bound.

    Other ids may lie between the bounds: clients may send any id, and collations differ in their
    treatment of points and dashes.
    """
    return f"{source}.0"


def last_of(source: str) -> str:
    """An upper bound of the ids from a source; see `first_of`."""
    return f"{source}.g"


def is_of(column: sa.ColumnElement[Any], source: str) -> sa.ColumnElement[bool]:
    """The exact condition that an id is from a source. No index serves this condition."""
    return (sa.func.length(column) == _length(source)) & (
        sa.func.substr(column, 1, len(source) + 1) == f"{source}."
    )


def is_from(name: str, source: str) -> bool:
    """Whether an id is from a source."""
    return len(name) == _length(source) and name.startswith(f"{source}.")


def _length(source: str) -> int:
    return len(source) + _TIME_DIGITS + 2 * _RANDOM_BYTES + 2


def bounds(source: str, hour: int) -> tuple[str, str]:
    """The lowest ids that a list of this hour and a list of a later hour can have."""
    first, after = (f"{start * HOUR_MS:0{_TIME_DIGITS}x}" for start in (hour, hour + 1))
    return f"{source}.{first}", f"{source}.{after}"
