"""The server that benchmarks ask: the service itself, with routes that do nothing beside it.

    python -m benchmarks.serving PORT

Settings come from the environment. ``/noop?bytes=N`` goes through the same middleware and answers
with N bytes; ``/noop-fastapi`` does so as a route of FastAPI, which adds what every endpoint pays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

READY_SECONDS = 60


def main() -> None:
    from app.core.logging import configure_logging
    from app.core.settings import load_settings
    from app.main import create_app

    settings = load_settings()
    configure_logging(settings)
    app = create_app(settings, own_process=True)

    async def noop(request: Request) -> Response:
        return Response(answers(request.query_params["bytes"]), media_type="application/json")

    kept: dict[str, bytes] = {}

    def answers(size: str) -> bytes:
        if size not in kept:
            kept[size] = b"x" * int(size)
        return kept[size]

    async def noop_fastapi() -> Response:
        return Response(b"{}", media_type="application/json")

    app.router.routes.insert(0, Route("/noop", noop))
    app.get("/noop-fastapi", response_model=None)(noop_fastapi)
    uvicorn.run(app, port=int(sys.argv[1]), log_config=None, access_log=False)


@dataclass(frozen=True)
class Server:
    """Where it is."""

    base: str
    pid: int
    data_dir: Path

    @property
    def rss(self) -> int:
        """Bytes of memory that it holds (Linux)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@contextlib.contextmanager
def server(data_dir: Path, **settings: object) -> Iterator[Server]:
    """A server on a copy of a data folder, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "var"
        shutil.copytree(data_dir, copy)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {f"NCR_{name.upper()}": str(value) for name, value in settings.items()}
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving", str(port)],
            env={
                "NCR_LOG_LEVEL": "warning",
                "OMP_WAIT_POLICY": "PASSIVE",
                **os.environ,
                "NCR_DATA_DIR": str(copy),
                **env,
            },
        )
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(base)
            yield Server(base, process.pid, copy)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _wait(base: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{base}/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    sys.exit("the server did not get ready")


if __name__ == "__main__":
    main()
