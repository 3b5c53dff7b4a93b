"""Limits of the HTTP protocol, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.http_protocol import MAX_HEAD_BYTES, BoundedProtocol
from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import listening

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HEAD = b"POST /events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
EVENT = b'{"user": "u", "item": "i"}\n'


class ImpatientProtocol(BoundedProtocol):
    head_seconds = 1.5
    silent_seconds = 1.5


@pytest.fixture
async def port(data_dir: Path) -> AsyncIterator[int]:
    """The port of a server with short time limits."""
    app = create_app(load_settings(data_dir=data_dir))
    async with listening(app, ImpatientProtocol) as port:
        yield port


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
