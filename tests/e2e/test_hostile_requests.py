"""Whatever is sent, the answer is one that the documentation knows, and the server goes on.

The long run is `make faults ARGS=fuzz`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzzing import bodies
from tests.fuzzing.server import KEY, FuzzedServer, fuzz_schema

pytestmark = pytest.mark.slow

HOST = b"Host: 127.0.0.1\r\nConnection: close\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
NDJSON = HOST + b"Content-Type: application/x-ndjson\r\n"
EVENT = b'{"user": "u", "item": "i"}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n1a\r\n" + EVENT + b"\r\n"


def get(path: bytes, headers: bytes = HOST) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + headers + b"\r\n"


def post(headers: bytes, body: bytes = EVENT, path: bytes = b"/events") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + headers + b"\r\n\r\n" + body


def length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


DEEP = b'[{"id": "a", "attributes": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]"
REQUESTS = {
    "not HTTP": (b"\x16\x03\x01\xff\x00hello\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "another version": (b"GET / HTTP/9.9\r\n" + HOST + b"\r\n", 400),
    "a method that is none": (b"BREW /items HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "bytes in the path": (get(b"/items/\xff\xfe"), 400),
    "half a character": (get(b"/items/%C3"), 422),
    "an overlong slash": (get(b"/items/%C0%AF"), 422),
    "a surrogate": (get(b"/items/%ED%A0%80"), 422),
    "NUL": (get(b"/items/%00"), 422),
    "half an escape": (get(b"/items/%4"), 422),
    "up and away": (get(b"/static-offline-docs/%2e%2e/%2e%2e/etc/passwd"), 404),
    "the service itself": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a query of rubbish": (get(b"/recommend/u?n=%ff&category=%00&exclude=%ED%A0%80&=&&;;"), 422),
    "digits without end": (get(b"/recommend/u?min_seq=" + b"9" * 5000), 422),
    "a path without end": (get(b"/recommend/" + b"a" * 200_000), 400),
    "a host that is none": (get(b"/items", b"Host: \xff\xfe[\r\nConnection: close\r\n"), 403),
    "another protocol": (
        get(b"/items", b"Host: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"),
        200,
    ),
    "less than nothing": (post(JSON + b"Content-Length: -1"), 400),
    "two lengths": (post(JSON + b"Content-Length: 5\r\nContent-Length: 26"), 400),
    "a length and chunks": (post(JSON + b"Content-Length: 5\r\n" + CHUNKED + b"0"), 400),
    "a length beyond all": (post(JSON + b"Content-Length: " + b"9" * 30), 400),
    "a length beyond ours": (post(JSON + b"Content-Length: 999999999999"), 413),
    "no body": (post(JSON + b"Content-Length: 0", b""), 400),
    "chunks of no size": (post(JSON + b"Transfer-Encoding: chunked", b"zz\r\nhello"), 400),
    "chunks too large": (post(JSON + b"Transfer-Encoding: chunked", b"f" * 20 + b"\r\nx"), 400),
    "an unknown coding": (post(JSON + b"Transfer-Encoding: rot13"), 400),
    "trailers": (post(JSON + CHUNKED + b"0\r\nX-T: 1\r\n", b""), 200),
    "a type in bytes": (post(HOST + b"Content-Type: \xff/\xfe\r\n" + length(EVENT)), 415),
    "UTF-16": (
        post(JSON + length(EVENT.decode().encode("utf-16")), EVENT.decode().encode("utf-16")),
        400,
    ),
    "depth": (post(JSON + b"Content-Length: 200000", b"[" * 200_000), 400),
    "depth in an item": (post(JSON + length(DEEP), DEEP, b"/items"), 200),
    "depth in a line": (post(NDJSON + b"Content-Length: 60000", b"[" * 60_000), 200),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedServer]:
    with FuzzedServer(tmp_path_factory.mktemp("wire")) as server:
        yield server
        assert server.lives()
        assert server.failures() == []


def talk(server: FuzzedServer, content: bytes, *, leave: bool = False) -> bytes:
    """What is answered until the server closes; nothing for who leaves at once."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(content)
            if leave:
                return b""
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize("name", REQUESTS)
def test_a_malformed_request_gets_its_status(server: FuzzedServer, name: str) -> None:
    content, status = REQUESTS[name]
    answer = talk(server, content)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:500]


def test_a_client_that_disconnects_is_no_server_error(server: FuzzedServer) -> None:
    """It was: an exception in the log, and an answer of 500 in the figures, for each of them."""
    talk(server, post(JSON + b"Content-Length: 100"), leave=True)
    talk(server, post(NDJSON + CHUNKED, b""), leave=True)
    talk(server, b"PUT /items/x HTTP/1.1\r\n" + JSON + b"Content-Length: 100\r\n\r\n{", leave=True)
    for _ in range(3):
        talk(server, get(b"/recommend/u"), leave=True)
    figures = talk(server, get(b"/metrics"))
    assert figures.startswith(b"HTTP/1.1 200 ")
    assert b'status="500"' not in figures
    assert server.failures() == []


def test_pipelined_requests_are_all_answered(server: FuzzedServer) -> None:
    ping = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    answer = talk(server, (ping + b"\r\n") * 50 + ping + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 51


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedServer]:
    with FuzzedServer(tmp_path_factory.mktemp("fuzzed"), KEY) as server:
        yield server
        assert server.lives()
        assert server.failures() == []


def test_every_operation_conforms_to_its_openapi_schema(
    keyed_server: FuzzedServer, tmp_path: Path
) -> None:
    report = fuzz_schema(keyed_server, 15, tmp_path)
    assert report["failures"] == [], report["output"]
    assert report["errors"] == [], report["output"]
    assert report["complete"]
    assert report["operations"]["tested"] == report["operations"]["total"] >= 20
    assert report["test_cases"]["generated"] > 500


def test_random_bodies_posted_as_events_get_documented_answers(keyed_server: FuzzedServer) -> None:
    with keyed_server.client() as client:
        bodies.for_each_body(500, lambda body: bodies.check_answer(body, bodies.post(client, body)))
