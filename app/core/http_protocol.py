"""The HTTP protocol of uvicorn with limits on requests and on unread answers.

The limits close connections whose request head does not end, connections that fall silent within a
request, and connections whose client does not read.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with time limits and limits on heads and unread answers."""

    head_seconds = 30.0
    """Time limit for a request head, from the connection or the previous request."""
    silent_seconds = 60.0
    """Time limit between two chunks of a body, while the server reads."""
    unread_seconds = 60.0
    """Time limit for a client that reads no further byte of an answer."""
    max_unread_bytes = 128 * 2**20
    """Limit on the unread answers of all connections. Beyond the limit the server drops
    connections, the longest unread first."""

    _timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the others wait in ``pipeline``
    _in_head = True
    _in_body = False
    _completed = False
    _head_bytes = 0
    _since = 0.0
    _unread_bytes = 0
    _unread_since = 0.0
    _is_next_due = False  # once the client has read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and tell the running request that the client is gone."""
        super().connection_lost(exc)  # which tells the one that came last
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
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
        if not self.pipeline:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """The request ends."""
        self._in_body, self._completed = False, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The next request begins, if there is one and the client has read the previous answer."""
        if self.flow.write_paused and not self.transport.is_closing():
            # Its answer would be made and wait in memory, uncounted.
            self._is_next_due = True
            return
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        self.flow.pause_reading()
        self._unread_since = self.loop.time()
        unread = [one for one in self.connections if isinstance(one, BoundedProtocol)]
        unread = [one for one in unread if one.flow.write_paused]
        total = sum(one.transport.get_write_buffer_size() for one in unread)
        for one in sorted(unread, key=lambda one: one._unread_since):
            if total <= self.max_unread_bytes:
                break
            total -= one.transport.get_write_buffer_size()
            one.transport.abort()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._unread_bytes = 0
        if not self.pipeline:
            self.flow.resume_reading()
        if self._is_next_due:
            self._is_next_due = False
            self.on_response_complete()

    def _schedule_check(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds / 4, self._check)

    def _check(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self._unread_since = unread, self.loop.time()
        elif unread and self.loop.time() - self._unread_since > self.unread_seconds:
            self.transport.abort()
            return
        silent = self.loop.time() - self._since
        if self._in_body and self.flow.read_paused:
            self._since = self.loop.time()  # the server itself paused reading
        elif silent > (self.silent_seconds if self._in_body else self.head_seconds) and (
            self._in_body or self._in_head
        ):
            self.transport.close()  # once the client has read what was answered
        self._schedule_check()
