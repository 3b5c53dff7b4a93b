"""A small HTTP client for load: closed loops, and open ones timed from when a request was due."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class Report:
    """What came back within the time that was measured."""

    seconds: float
    latencies: dict[int, list[float]] = field(default_factory=dict)
    """In seconds, by status; −1 for a connection that failed."""

    @property
    def statuses(self) -> Counter[int]:
        return Counter({status: len(own) for status, own in self.latencies.items()})

    def rate(self, status: int = 200) -> float:
        """Answers of this status a second."""
        return len(self.latencies.get(status, ())) / self.seconds

    def quantile(self, q: float, status: int = 200) -> float:
        """Milliseconds; NaN where there was no such answer."""
        own = sorted(self.latencies.get(status, ()))
        return own[min(len(own) - 1, int(q * len(own)))] * 1e3 if own else float("nan")


class _Connection(asyncio.Protocol):
    """One request at a time over one connection."""

    def __init__(self, done: Callable[[_Connection, int], None]) -> None:
        self._done = done
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes, due: float) -> None:
        assert self._transport is not None
        self.due, self._buffer = due, b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(buffer, 0, end)
        if length is None or len(buffer) < end + 4 + int(length[1]):
            return
        self._done(self, int(buffer[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._done(self, -1)

    @property
    def open(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        if self._transport is not None:
            self._done = lambda *_: None
            self._transport.close()


def requests_for(base: str, paths: Iterable[str]) -> list[bytes]:
    """GET requests as they go over the wire."""
    host = urlsplit(base).netloc
    return [f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() for path in paths]


async def closed_loop(
    base: str, requests: Iterator[bytes], connections: int, seconds: float, warm_up: float = 0.5
) -> Report:
    """Each connection asks again as soon as it has its answer."""
    loop = asyncio.get_running_loop()
    report = Report(seconds)
    begin = time.perf_counter() + warm_up
    end = begin + seconds
    running, finished = connections, loop.create_future()

    def done(connection: _Connection, status: int) -> None:
        nonlocal running
        now = time.perf_counter()
        if begin <= now < end:
            report.latencies.setdefault(status, []).append(now - connection.due)
        if now < end and connection.open:
            connection.send(next(requests), now)
        else:
            running -= 1
            if not running and not finished.done():
                finished.set_result(None)

    every = await _connect(base, connections, done)
    for connection in every:
        connection.send(next(requests), time.perf_counter())
    await finished
    for connection in every:
        connection.close()
    return report


async def open_loop(
    base: str,
    requests: Iterator[bytes],
    rate: float,
    seconds: float,
    connections: int = 256,
    warm_up: float = 0.5,
) -> Report:
    """Requests are due at equal steps, however long answers take; a latency counts from when its
    request was due, whether it could be sent then or had to wait for a free connection."""
    report = Report(seconds)
    waiting: deque[float] = deque()
    begin = time.perf_counter() + warm_up
    end = begin + seconds

    def done(connection: _Connection, status: int) -> None:
        if begin <= connection.due < end:
            own = report.latencies.setdefault(status, [])
            own.append(time.perf_counter() - connection.due)
        if not connection.open:
            return
        if waiting:
            connection.send(next(requests), waiting.popleft())
        else:
            idle.append(connection)

    every = await _connect(base, connections, done)
    idle = list(every)
    due = time.perf_counter()
    while due < end:
        now = time.perf_counter()
        while due <= now:
            if idle:
                idle.pop().send(next(requests), due)
            else:
                waiting.append(due)
            due += 1 / rate
        await asyncio.sleep(max(0.0, min(due - now, 0.001)))
    for _ in range(1_500):
        if not waiting and len(idle) >= sum(one.open for one in every):
            break
        await asyncio.sleep(0.01)
    for connection in every:
        connection.close()
    return report


async def _connect(
    base: str, connections: int, done: Callable[[_Connection, int], None]
) -> list[_Connection]:
    parts = urlsplit(base)
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(connections):
        _, protocol = await loop.create_connection(
            lambda: _Connection(done), str(parts.hostname), int(parts.port or 80)
        )
        made.append(protocol)
    return made
