"""A small proxy: each new connection goes to the next server that is ready.

    python -m deploy.proxy --listen 127.0.0.1:8000 --backend 127.0.0.1:8001 --backend …

It passes bytes on and reads none, so bodies stream both ways. Half a second after a server says
that it is not ready it gets no new connections; those that it has go on. One that refuses a
connection is passed over at once. For one machine and for tests; elsewhere see `nginx.conf`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass, field

CHECK_SECONDS = 0.5
CHECK_TIMEOUT = 2.0
CONNECT_TIMEOUT = 2.0
CHUNK = 64 * 1024
NOBODY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n"
    b"retry-after: 1\r\nconnection: close\r\ncontent-length: 59\r\n\r\n"
    b'{"status":503,"code":"no_server","detail":"none answers"} \n'
)


@dataclass
class Backend:
    """A server behind the proxy."""

    host: str
    port: int
    ready: bool = False

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection; OSError or TimeoutError when there is none."""
        async with asyncio.timeout(CONNECT_TIMEOUT):
            return await asyncio.open_connection(self.host, self.port)

    async def check(self) -> bool:
        """Whether `/health/ready` says 200."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    host = f"{self.host}:{self.port}".encode()
                    writer.write(
                        b"GET /health/ready HTTP/1.1\r\nhost: " + host + b"\r\n"
                        b"connection: close\r\n\r\n"
                    )
                    status = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        return status.split(b" ")[1:2] == [b"200"]


@dataclass
class Proxy:
    """Balances connections over servers: `start()`, and `stop()` at the end."""

    backends: list[Backend]
    _next: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens there, once every server has been looked at."""
        await asyncio.gather(*(self._look(backend) for backend in self.backends))
        for backend in self.backends:
            self._keep(asyncio.create_task(self._watch(backend)))
        self._server = await asyncio.start_server(self._accept, host, port)

    async def stop(self) -> None:
        """Closes everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, backend: Backend) -> None:
        ready = await backend.check()
        if ready != backend.ready:
            word = "ready" if ready else "not ready"
            print(f"{backend.host}:{backend.port} is {word}", file=sys.stderr, flush=True)
        backend.ready = ready

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._look(backend)

    def _order(self) -> list[Backend]:
        # When none is ready one that can be reached is still asked: it can say what is wrong.
        self._next = (self._next + 1) % len(self.backends)
        turned = self.backends[self._next :] + self.backends[: self._next]
        return sorted(turned, key=lambda backend: not backend.ready)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - streams run this in a task
        self._keep(task)
        try:
            for backend in self._order():
                try:
                    there, back = await backend.connect()
                except (OSError, TimeoutError):
                    backend.ready = False  # until the next look
                    continue
                try:
                    await _join(reader, writer, there, back)
                finally:
                    back.close()
                return
            await reader.read(CHUNK)
            writer.write(NOBODY)
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # the client has gone, or the proxy ends
        finally:
            writer.close()


async def _join(
    client: asyncio.StreamReader,
    to_client: asyncio.StreamWriter,
    server: asyncio.StreamReader,
    to_server: asyncio.StreamWriter,
) -> None:
    """Passes bytes on in both directions until the server closes, or either is gone."""
    up = asyncio.create_task(_pass_on(client, to_server))
    down = asyncio.create_task(_pass_on(server, to_client))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            up.result()
        # A client that has said all it has to say may still wait for its answer.
        await down
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK):
        target.write(chunk)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def run(listen: tuple[str, int], backends: list[tuple[str, int]]) -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    proxy = Proxy([Backend(*address) for address in backends])
    await proxy.start(*listen)
    try:
        await stop.wait()
    finally:
        await proxy.stop()


def address(text: str) -> tuple[str, int]:
    """`host:port`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return host, int(port)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.proxy", description=__doc__)
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8000))
    parser.add_argument("--backend", type=address, action="append", required=True)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(given.listen, given.backend))


if __name__ == "__main__":
    main()
