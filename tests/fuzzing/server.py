"""A real server with a trained model, to be fuzzed by schemathesis or with bodies of one's own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2

from app.core.settings import load_settings
from app.wiring import build_services
from tests.app.conftest import add_small_data, publish_model
from tests.cluster.servers import NcrServer, get_status

KEY = "a-key-of-sixteen-or-more"
CONFIG = Path(__file__).with_name("schemathesis.toml")


class FuzzedServer(NcrServer):
    """`ncr serve` without a worker: the trainings that are asked for only wait."""

    def __init__(self, data_dir: Path, key: str | None = None) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        asyncio.run(_prepare(data_dir))
        env = {"NCR_DATA_DIR": str(data_dir), "NCR_LOG_FORMAT": "json"}
        if key is not None:
            env["NCR_ADMIN_KEY"] = key
        self.headers = {} if key is None else {"X-API-Key": key}
        super().__init__(env, data_dir / "server.log")

    def client(self) -> httpx2.Client:
        """One that gives up a request after twenty seconds."""
        return httpx2.Client(base_url=self.url, timeout=20, headers=self.headers)

    def lives(self) -> bool:
        """Whether it answers."""
        return get_status(self.port, "/health/live", timeout=10) == 200

    def failures(self) -> list[str]:
        """The lines of its log that tell of an exception nobody caught."""
        lines = self.log_text().splitlines()
        return [line[:500] for line in lines if "request failed" in line or "Exception in" in line]


async def _prepare(data_dir: Path) -> None:
    services = await build_services(load_settings(data_dir=data_dir, database_url=None))
    try:
        await add_small_data(services)
        for _ in range(2):
            await publish_model(services)
    finally:
        await services.close()


def fuzz_schema(
    server: FuzzedServer, examples: int, folder: Path, *, seed: int = 1, timeout: float = 300
) -> dict[str, Any]:
    """Runs schemathesis as a process of its own: its report, and what it printed as `output`.

    Raises subprocess.TimeoutExpired after ``timeout`` seconds.
    """
    report = folder / "schemathesis.json"
    headers = [part for item in server.headers.items() for part in ("-H", ": ".join(item))]
    command = "from schemathesis.cli import schemathesis; schemathesis()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", command, "--config-file", str(CONFIG)),
            *("run", f"{server.url}/openapi.json", *headers, "-n", str(examples)),
            *("--seed", str(seed), "--generation-deterministic", "--no-color"),
            *("--report", "json", "--report-json-path", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=folder,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(report.read_text())
    return result | {"output": done.stdout}
