"""Random names for requests and answers, without a call of the system for each."""

from __future__ import annotations

import os
import threading

_AT_ONCE = 4096


class _Pool:
    """The system's random bytes, fetched some thousand at a time.

    Each fetch lets go of Python's lock, and a thread that computes gives it back late.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forgets what was fetched: a forked process must not give out the same."""
        self._bytes = b""
        self._lock = threading.Lock()

    def take(self, n: int) -> bytes:
        with self._lock:
            if len(self._bytes) < n:
                self._bytes = os.urandom(_AT_ONCE)
            taken, self._bytes = self._bytes[:n], self._bytes[n:]
        return taken


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.renew)


def random_hex(n: int) -> str:
    """``n`` random bytes in hexadecimal digits, as unpredictable as the system's."""
    return _pool.take(n).hex()
