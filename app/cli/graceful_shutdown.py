"""Graceful shutdown: the server reports that it stops before it refuses connections."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from app.core.monitoring import Readiness

POLL_SECONDS = 0.05
LAST_REQUEST_SECONDS = 0.2


class DrainingServer(uvicorn.Server):
    """A server that is not ready from SIGTERM on, and refuses connections ``notice`` seconds later.

    A load balancer sees that the server is not ready, and sends new connections to other servers.
    Persistent connections end with their next response, so that no request meets a closed
    connection.
    """

    def __init__(self, config: uvicorn.Config, readiness: Readiness, notice: float) -> None:
        super().__init__(config)
        self._readiness = readiness
        self._notice = notice

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Report at once that the server stops."""
        self._readiness.draining = True
        if sig == signal.SIGINT:
            self._notice = 0  # a person waits at the terminal
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the notice, then stop."""
        self._readiness.draining = True
        # On every response from now on, and at no cost before.
        close = (b"connection", b"close")
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        loop = asyncio.get_running_loop()
        notified = loop.time()
        # By polling: a signal, which sets no event, can shorten the time.
        while not self.force_exit and loop.time() < notified + self._notice:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        for server in self.servers:
            server.close()
        # The last connections have yet to send their requests; uvicorn would close them.
        await asyncio.sleep(LAST_REQUEST_SECONDS)
        await super().shutdown(sockets)
