"""A receiver of webhooks: a real HTTP server that checks signatures by itself."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

SECRET = "a secret of at least sixteen"


class Received(NamedTuple):
    """A request as it came in."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content


class Receiver:
    """Answers with the next of ``answers``, then with 204."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answers: list[bytes] = []
        self.pause = 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.path, headers, body))
                time.sleep(receiver.pause)
                answer = receiver.answers.pop(0) if receiver.answers else b""
                self.wfile.write(answer or b"HTTP/1.1 204 No Content\r\n\r\n")
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/hook?token=in-the-url"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def types(self) -> list[str]:
        return [one.message["type"] for one in self.received]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def assert_signed(one: Received, secret: bytes = SECRET.encode()) -> None:
    """As the documents say that a receiver checks it."""
    at = one.headers["webhook-timestamp"]
    assert abs(time.time() - int(at)) < 300
    signed = b"%s.%s.%s" % (one.headers["webhook-id"].encode(), at.encode(), one.body)
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    expected = "v1," + base64.b64encode(digest).decode()
    assert hmac.compare_digest(one.headers["webhook-signature"], expected)
