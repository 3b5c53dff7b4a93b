"""The server's reading of HTTP, with bounds: nobody may send a head without an end, or fall silent
in the middle of a request and keep the connection."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's own, which sets no bounds of this kind."""

    head_seconds = 30.0
    """For a whole head, from the connection or the request before."""
    silent_seconds = 60.0
    """Between two pieces of a body, while the server wants more of it."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _in_body = False
    _completed = False
    _head_bytes = 0
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._completed = False
        super().data_received(data)
        if self._in_body:
            self._since = self.loop.time()
        elif self._in_head and not self._completed and not self.transport.is_closing():
            # Counted by what came: the parser tells of a header when it has all of it. What came
            # together with the end of the request before is let off.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body, self._completed = False, True
        super().on_message_complete()

    def _look_again(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds / 4, self._look)

    def _look(self) -> None:
        silent = self.loop.time() - self._since
        if self._in_body and self.flow.read_paused:
            self._since = self.loop.time()  # it is we who do not take more
        elif silent > (self.silent_seconds if self._in_body else self.head_seconds) and (
            self._in_body or self._in_head
        ):
            self.transport.close()
            return
        self._look_again()
