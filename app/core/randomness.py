"""Random ids of requests and lists, without a system call for each.

A system call gives Python's lock away. While another thread computes, that thread takes the lock,
and the request waits until it gets it back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

MAX_BYTES = 8  # of an id
_FETCHED_BYTES = 4096


class _Pool:
    """Random bytes of the system, fetched many at a time. Each is handed out once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop what was fetched: a forked process must not hand out the same."""
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

    They are as unpredictable as `os.urandom`.
    """
    return _pool.take()[:n].hex()
