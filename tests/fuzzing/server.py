"""A real server with a trained model, to be fuzzed; shared by the tests and the long runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from app.core.settings import load_settings
from app.services import build_services
from deploy.processes import NcrServer, get_status
from tests.app.models import add_small_data, publish_model

KEY = "a-key-of-sixteen-or-more"


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
