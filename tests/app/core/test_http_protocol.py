"""Limits of the HTTP protocol, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.core.http_protocol import MAX_HEAD_BYTES, BoundedProtocol
from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import listening, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HEAD = b"POST /events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
EVENT = b'{"user": "u", "item": "i"}\n'


class ImpatientProtocol(BoundedProtocol):
    head_seconds = 1.5
    silent_seconds = 1.5
    unread_seconds = 1.5


@pytest.fixture
async def port(data_dir: Path) -> AsyncIterator[int]:
    """The port of a server with short time limits."""
    app = create_app(load_settings(data_dir=data_dir))
    async with listening(app, ImpatientProtocol) as port:
        yield port


class WatchedProtocol(BoundedProtocol):
    """Notes the connections, in the order in which they were made."""

    made: ClassVar[list[WatchedProtocol]]

    def __init_subclass__(cls) -> None:
        cls.made = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made.append(self)

    @property
    def is_stuck(self) -> bool:
        """Whether an answer waits for the client to read."""
        return self.flow.write_paused and not self.transport.is_closing()

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way, whose answer is in memory or will be."""
        return self._running is not None and not self._running.response_complete


@asynccontextmanager
async def with_large_answers(data_dir: Path, protocol: type[BoundedProtocol]) -> AsyncIterator[int]:
    """The port of a server that processes two lists at a time; one of 1,000 is 0.3 MB."""
    app = create_app(load_settings(data_dir=data_dir, max_concurrency=2))
    async with listening(app, protocol) as port:
        rows = [{"id": f"item-{n}", "title": "t" * 250} for n in range(1000)]
        await app.state.services.catalog.upsert_rows(rows)
        yield port


def pipeline(
    connections: ExitStack, port: int, buffer_bytes: int = 4096, requests: int = 40
) -> socket.socket:
    """A connection with many requests for large answers, of which nothing is read."""
    connection = connections.enter_context(closing(socket.socket()))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.connect(("127.0.0.1", port))
    asked = b"GET /recommend/nobody?n=1000 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    connection.sendall(asked * requests)
    return connection


async def test_clients_that_read_nothing_hold_no_place_of_others(data_dir: Path) -> None:
    class Protocol(WatchedProtocol):
        pass

    asked = b"GET /recommend/ann HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    async with with_large_answers(data_dir, Protocol) as port:
        with ExitStack() as connections:
            for _ in range(2):
                pipeline(connections, port)
            await until(lambda: sum(one.is_stuck for one in Protocol.made) == 2)
            await asyncio.sleep(0.2)  # the next request of each has its answer, too
            assert (await talk(port, asked)).startswith(b"HTTP/1.1 200 ")


async def test_connections_whose_answers_nobody_reads_are_closed(data_dir: Path) -> None:
    class Protocol(WatchedProtocol):
        head_seconds = 1.0
        unread_seconds = 1.0

    async with with_large_answers(data_dir, Protocol) as port:
        with ExitStack() as connections:
            pipeline(connections, port)
            slow = pipeline(connections, port, 2**16, 400)  # for longer than the test
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            end = loop.time() + 3.0
            closed = False
            async with asyncio.timeout(30):  # a busy machine makes the answers late
                while not closed or loop.time() < end:
                    assert await loop.sock_recv(slow, 2**15)  # one who reads slowly is kept
                    await asyncio.sleep(0.01)
                    closed = Protocol.made[0].transport.is_closing()
            assert not Protocol.made[1].transport.is_closing()


async def test_unread_answers_are_bounded_and_the_longest_unread_goes_first(
    data_dir: Path,
) -> None:
    class Protocol(WatchedProtocol):
        max_unread_bytes = 1_000_000

    async with with_large_answers(data_dir, Protocol) as port:
        with ExitStack() as connections:
            for n in range(1, 9):
                pipeline(connections, port)
                await until(lambda n=n: len(Protocol.made) == n and Protocol.made[-1].is_stuck)
            stuck = [one for one in Protocol.made if one.is_stuck]
            unread = [one.transport.get_write_buffer_size() for one in stuck]
            assert 0 < sum(unread) <= 1_000_000
            await until(lambda: not any(one.is_answering for one in stuck))
            assert not Protocol.made[0].is_stuck


@pytest.mark.parametrize("before", [0, 1])
async def test_a_request_with_others_behind_it_is_told_of_a_lost_connection(
    data_dir: Path, before: int
) -> None:
    app = create_app(load_settings(data_dir=data_dir))
    waits, told = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> Response:
        waits.set()
        while not await request.is_disconnected():  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        told.set()
        return Response()

    app.router.routes.insert(0, Route("/wait", wait))
    async with listening(app, BoundedProtocol) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        paths = [b"/health/live"] * before + [b"/wait"] + [b"/health/live"] * 2
        writer.write(b"".join(asked % path for path in paths))
        async with asyncio.timeout(5):
            await waits.wait()
            await asyncio.sleep(0.05)  # those behind it have come
            writer.close()
            await told.wait()


async def talk(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """The response, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_an_end_is_refused(port: int) -> None:
    start = b"GET /items HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
    answer = await talk(port, start, *[b"a" * 8192] * (MAX_HEAD_BYTES // 8192 + 1))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    good = b"X-B: " + b"b" * 20_000 + b"\r\nConnection: close\r\n\r\n"
    assert (await talk(port, b"GET /items HTTP/1.1\r\nHost: 127.0.0.1\r\n", good)).startswith(
        b"HTTP/1.1 200 "
    )


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"GET /items HTT",),
        (HEAD + b"Content-Length: 100\r\n\r\n" + EVENT,),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1b\r\n" + EVENT + b"\r\n",),
    ],
)
async def test_silent_connections_are_closed(port: int, parts: tuple[bytes, ...]) -> None:
    assert not (await talk(port, *parts)).startswith(b"HTTP/1.1 2")


async def test_slow_connections_that_send_are_kept(port: int) -> None:
    pieces = [b"1b\r\n" + EVENT + b"\r\n"] * 5
    answer = await talk(
        port,
        HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
        *pieces,
        b"0\r\n\r\n",
        pause=0.05,
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"accepted":5' in answer


async def test_a_pipelined_request_is_not_counted_to_the_previous_head(port: int) -> None:
    """What came with a body does not count as part of the next head."""
    body = b"[" + b",".join([EVENT.strip()] * 3000) + b"]"
    head = b"POST /events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    first = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    second = b"GET /items HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    answer = await talk(port, first + second, b"\r\n", pause=0.05)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 200 ") == 2
