"""A small proxy: each new connection goes to the next server that is ready.

    python -m tests.cluster.proxy --listen 8000 --backend 8001 --backend 8002

It passes bytes on and reads none, so bodies stream both ways. Half a second after a server says
that it is not ready it gets no new connections; those that it has go on. One that refuses a
connection is skipped at once. All ports are on 127.0.0.1; elsewhere see `nginx.conf`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass

from tests.cluster.process import HOST
from tests.cluster.servers import get_status

CHECK_SECONDS = 0.5
CONNECT_SECONDS = 2.0
CHUNK_BYTES = 64 * 1024
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n"
    b"retry-after: 1\r\nconnection: close\r\ncontent-length: 59\r\n\r\n"
    b'{"status":503,"code":"no_server","detail":"none answers"} \n'
)


@dataclass
class Backend:
    """A server behind the proxy."""

    port: int
    ready: bool = False

    async def check(self) -> None:
        """Asks `/health/ready`, and logs a change."""
        ready = await asyncio.to_thread(get_status, self.port, "/health/ready") == 200
        if ready != self.ready:
            word = "ready" if ready else "not ready"
            print(f"{HOST}:{self.port} is {word}", file=sys.stderr, flush=True)
        self.ready = ready

    async def watch(self) -> None:
        """Checks it again and again."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()


class Proxy:
    """Balances connections over servers."""

    def __init__(self, ports: list[int]) -> None:
        self.backends = [Backend(port) for port in ports]
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, port: int, stop: asyncio.Event) -> None:
        """Listens on the port, once every server has been checked, until ``stop`` is set."""
        await asyncio.gather(*(backend.check() for backend in self.backends))
        self._tasks |= {asyncio.create_task(backend.watch()) for backend in self.backends}
        server = await asyncio.start_server(self._accept, HOST, port)
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _order(self) -> list[Backend]:
        # When none is ready one that can be reached is still used: it can say what is wrong.
        self._next = (self._next + 1) % len(self.backends)
        turned = self.backends[self._next :] + self.backends[: self._next]
        return sorted(turned, key=lambda backend: not backend.ready)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            for backend in self._order():
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        server = await asyncio.open_connection(HOST, backend.port)
                except (OSError, TimeoutError):
                    backend.ready = False  # until the next check
                    continue
                try:
                    await _join((reader, writer), server)
                finally:
                    server[1].close()
                return
            await reader.read(CHUNK_BYTES)
            writer.write(UNAVAILABLE)
            await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass  # the client has gone, or the proxy ends
        finally:
            writer.close()


async def _join(
    client: tuple[StreamReader, StreamWriter], server: tuple[StreamReader, StreamWriter]
) -> None:
    """Passes bytes on in both directions until the server closes, or either is gone."""
    up = asyncio.create_task(_pass_on(client[0], server[1]))
    down = asyncio.create_task(_pass_on(server[0], client[1]))
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


async def _pass_on(source: StreamReader, target: StreamWriter) -> None:
    while chunk := await source.read(CHUNK_BYTES):
        target.write(chunk)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def run(port: int, backends: list[int]) -> None:
    """Runs a proxy until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Proxy(backends).run(port, stop)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.proxy", description=__doc__)
    parser.add_argument("--listen", type=int, default=8000)
    parser.add_argument("--backend", type=int, action="append", required=True)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options.listen, options.backend))


if __name__ == "__main__":
    main()
