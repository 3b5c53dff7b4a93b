"""A server that says it is going before it goes."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from app.core.health import Readiness

LOOK_SECONDS = 0.05
LAST_SECONDS = 0.2


class DrainingServer(uvicorn.Server):
    """On SIGTERM not ready at once; after ``notice`` seconds no more connections, then the end.

    Who spreads requests over servers sees the first and sends new connections elsewhere. Those
    that are kept alive end with their next answer, so that no request meets a closed one.
    """

    def __init__(self, config: uvicorn.Config, readiness: Readiness, notice: float) -> None:
        super().__init__(config)
        self._readiness = readiness
        self._notice = notice

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._readiness.draining = True
        if sig == signal.SIGINT:
            self._notice = 0  # somebody waits for the prompt
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.draining = True
        # On every answer from now on, and at no cost before.
        close = (b"connection", b"close")
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        loop = asyncio.get_running_loop()
        told = loop.time()
        # Looked at again and again: the time can be cut short by a signal, which sets no event.
        while not self.force_exit and loop.time() < told + self._notice:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        for server in self.servers:
            server.close()
        # Who was let in last has yet to say what for; uvicorn would show them out at once.
        await asyncio.sleep(LAST_SECONDS)
        await super().shutdown(sockets)
