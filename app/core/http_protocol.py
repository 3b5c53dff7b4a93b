"""HTTP protocol of uvicorn with limits on the size and the duration of requests.

They close connections whose request head has no end, and those that fall silent within a request.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with time limits and a limit on the head's size."""

    head_seconds = 30.0
    """Time limit for a request head, from the connection or the previous request."""
    silent_seconds = 60.0
    """Time limit between two chunks of a body, while the server reads."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _in_body = False
    _completed = False
    _head_bytes = 0
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head."""
        self._completed = False
        super().data_received(data)
        if self._in_body:
            self._since = self.loop.time()
        elif self._in_head and not self._completed and not self.transport.is_closing():
            # By the bytes received: the parser reports a header when it is complete. Bytes that
            # came together with the end of the previous request are not counted.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """A request head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._since = self.loop.time()

    def on_headers_complete(self) -> None:
        """The head ends and the body begins."""
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request ends."""
        self._in_body, self._completed = False, True
        super().on_message_complete()

    def _schedule_check(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds / 4, self._check)

    def _check(self) -> None:
        silent = self.loop.time() - self._since
        if self._in_body and self.flow.read_paused:
            self._since = self.loop.time()  # the server itself paused reading
        elif silent > (self.silent_seconds if self._in_body else self.head_seconds) and (
            self._in_body or self._in_head
        ):
            self.transport.close()
            return
        self._schedule_check()
