"""The service under load: a server of its own, and a client of closed and open loops.

    python -m benchmarks.load PORT

serves with the settings of the environment, and with routes that do nothing beside it:
``/noop?bytes=N`` goes through the same middleware and answers with N bytes; ``/noop-fastapi`` does
so as a route of FastAPI, which adds what every endpoint pays. ``/recount`` counts popularity anew,
as after a deletion, and answers when that is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

READY_SECONDS = 300  # a new checkout compiles its kernels first
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class Report:
    """The responses that came back within the measured time."""

    seconds: float
    latencies: dict[int, list[float]] = field(default_factory=dict)
    """In seconds, by status; −1 for a connection that failed."""

    @property
    def statuses(self) -> Counter[int]:
        return Counter({status: len(times) for status, times in self.latencies.items()})

    def rate(self, status: int = 200) -> float:
        """Responses of this status a second."""
        return len(self.latencies.get(status, ())) / self.seconds

    def quantile(self, q: float, status: int = 200) -> float:
        """Milliseconds; NaN where there was no such response."""
        times = sorted(self.latencies.get(status, ()))
        return times[min(len(times) - 1, int(q * len(times)))] * 1e3 if times else float("nan")

    def record(self, status: int, seconds: float) -> None:
        self.latencies.setdefault(status, []).append(seconds)


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
    """Each connection sends the next request as soon as it has its response."""
    report = Report(seconds)
    begin = time.perf_counter() + warm_up
    end = begin + seconds
    running, finished = connections, asyncio.get_running_loop().create_future()

    def done(connection: _Connection, status: int) -> None:
        nonlocal running
        now = time.perf_counter()
        if begin <= now < end:
            report.record(status, now - connection.due)
        if now < end and connection.open:
            connection.send(next(requests), now)
        else:
            running -= 1
            if not running and not finished.done():
                finished.set_result(None)

    pool = await _connect(base, connections, done)
    for connection in pool:
        connection.send(next(requests), time.perf_counter())
    await finished
    for connection in pool:
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
    """Requests are due at equal steps, however long responses take.

    A latency counts from when its request was due, whether it could be sent then or had to wait for
    a free connection.
    """
    report = Report(seconds)
    waiting: deque[float] = deque()
    begin = time.perf_counter() + warm_up
    end = begin + seconds

    def done(connection: _Connection, status: int) -> None:
        if begin <= connection.due < end:
            report.record(status, time.perf_counter() - connection.due)
        if not connection.open:
            return
        if waiting:
            connection.send(next(requests), waiting.popleft())
        else:
            idle.append(connection)

    pool = await _connect(base, connections, done)
    idle = list(pool)
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
        if not waiting and len(idle) >= sum(one.open for one in pool):
            break
        await asyncio.sleep(0.01)
    for connection in pool:
        connection.close()
    return report


async def _connect(
    base: str, connections: int, done: Callable[[_Connection, int], None]
) -> list[_Connection]:
    parts = urlsplit(base)
    create = asyncio.get_running_loop().create_connection
    address = str(parts.hostname), int(parts.port or 80)
    return [(await create(lambda: _Connection(done), *address))[1] for _ in range(connections)]


@dataclass(frozen=True)
class Server:
    """A running server of this module."""

    url: str
    pid: int
    data_dir: Path

    @property
    def rss(self) -> int:
        """Bytes of memory that it holds (Linux)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@contextlib.contextmanager
def server(data_dir: Path, **settings: object) -> Iterator[Server]:
    """A server on a copy of a data folder, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(data_dir, Path(scratch) / "var"))
        with server_in_place(copy, **settings) as running:
            yield running


@contextlib.contextmanager
def server_in_place(data_dir: Path, **settings: object) -> Iterator[Server]:
    """A server on a data folder, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"NCR_LOG_LEVEL": "warning", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    env |= {f"NCR_{name.upper()}": str(value) for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load", str(port)],
        env=env | {"NCR_DATA_DIR": str(data_dir)},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url)
        yield Server(url, process.pid, data_dir)
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(url: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    sys.exit("the server did not get ready")


def main() -> None:
    from app.cli.serve import http_protocol
    from app.core.logging import configure_logging
    from app.core.settings import load_settings
    from app.main import create_app

    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format)
    app = create_app(settings, own_process=True)

    @cache
    def content(size: str) -> bytes:
        return b"x" * int(size)

    async def noop(request: Request) -> Response:
        return Response(content(request.query_params["bytes"]), media_type="application/json")

    async def noop_fastapi() -> Response:
        return Response(b"{}", media_type="application/json")

    async def recount(request: Request) -> Response:
        await app.state.recommend.popularity.start(600.0)
        return Response(b"{}", media_type="application/json")

    app.router.routes.insert(0, Route("/noop", noop))
    app.router.routes.insert(0, Route("/recount", recount))
    app.get("/noop-fastapi", response_model=None)(noop_fastapi)
    uvicorn.run(app, port=int(sys.argv[1]), http=http_protocol(), log_config=None, access_log=False)


if __name__ == "__main__":
    main()
