"""A real server with a trained model, to be fuzzed; shared by the tests and the long runs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx2

from app.core.settings import load_settings
from app.services import build_services
from tests.app.models import add_small_data, publish_model

NCR = [sys.executable, "-c", "from app.cli import main; main()"]
START_SECONDS = 60


class FuzzedServer:
    """`ncr serve` without a worker: the trainings that are asked for only wait."""

    def __init__(self, data_dir: Path, key: str | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = data_dir / "server.log"
        data_dir.mkdir(parents=True, exist_ok=True)
        asyncio.run(_prepare(data_dir))
        env = {**os.environ, "NCR_DATA_DIR": str(data_dir), "NCR_LOG_FORMAT": "json"}
        if key is not None:
            env["NCR_ADMIN_KEY"] = key
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*NCR, "serve", "--port", str(self.port)], env=env, stderr=log, stdout=log
            )

    def __enter__(self) -> FuzzedServer:
        deadline = time.monotonic() + START_SECONDS
        while not self.lives("ready"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(30)

    def lives(self, what: str = "live") -> bool:
        """Whether it answers."""
        try:
            return httpx2.get(f"{self.url}/health/{what}", timeout=10).status_code == 200
        except httpx2.TransportError:
            return False

    def failures(self) -> list[str]:
        """The lines of its log that tell of an exception nobody caught."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:500] for line in lines if "request failed" in line or "Exception in" in line]


async def _prepare(data_dir: Path) -> None:
    services = await build_services(load_settings(data_dir=data_dir, database_url=None))
    try:
        await add_small_data(services)
        for _ in range(2):
            await publish_model(services)
    finally:
        await services.close()
