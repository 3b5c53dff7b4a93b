"""A service in a thread, and Chromium, which looks at it.

Playwright leaves a loop running in the main thread: these tests have a process of their own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvicorn
from fastapi import FastAPI

from app.core.http_protocol import BoundedProtocol
from app.core.settings import load_settings
from app.jobs.repository import JobRepository
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import add_small_data, publish_model

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

CHROMIUM = os.environ.get("NCR_TEST_CHROMIUM", "chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SCRIPT = "<script>document.title='taken over'</script>"
ODD_ITEM = "a/b \"q\" 'é' 🎬"
Result = TypeVar("Result")


@dataclass
class Site:
    """A running service."""

    app: FastAPI
    loop: asyncio.AbstractEventLoop
    url: str = ""
    user: str = ""
    item: str = ""
    versions: list[str] = field(default_factory=list)
    job: str = ""

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def serve(folder: Path, *, filled: bool) -> Iterator[Site]:
    """A service on SQLite: empty, or with two versions and a training that runs."""
    started: Future[Site] = Future()

    async def main() -> None:
        settings = load_settings(data_dir=folder, precompute_users=0, model_poll_seconds=0.2)
        app = create_app(settings)
        site = Site(app, asyncio.get_running_loop())
        async with app.router.lifespan_context(app):
            if filled:
                await fill(site)
            config = uvicorn.Config(
                app, port=0, http=BoundedProtocol, log_config=None, access_log=False, lifespan="off"
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.01)
            site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            started.set_result(site)
            await asyncio.to_thread(over.wait)
            server.should_exit = True
            await asyncio.wait_for(serving, 20)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    over = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield started.result(120)
    finally:
        over.set()
        thread.join(30)


async def fill(site: Site) -> None:
    """Data, two versions, strangers' text, and a training that has come to its third epoch."""
    services = site.services
    await add_small_data(services)
    for epochs in (5, 8):
        site.versions.append(await publish_model(services, epochs=epochs))
    await services.catalog.upsert_rows(
        [{"id": ODD_ITEM, "title": SCRIPT, "categories": [SCRIPT], "attributes": {"a": SCRIPT}}]
    )
    await services.events.add_rows([{"user": SCRIPT, "item": ODD_ITEM, "type": SCRIPT}], 1)
    await services.events.add_rows([{"user": "x"}], 1)
    site.user = str(await services.events.example_user())
    site.item = (await services.events.history(site.user, None, 1))[0][0][1]
    jobs = JobRepository(services.database)
    site.job = await jobs.insert("train", {"recipe": "auto", "trigger": "request"})
    await report(site, 3)
    await site.app.state.recommend.models.refresh()


async def report(site: Site, epoch: int) -> None:
    """What a worker writes after an epoch of the running training."""
    jobs = JobRepository(site.services.database)
    claim = getattr(site, "_claim", None) or await jobs.claim("browser", 10**9, 3)
    assert claim is not None
    vars(site)["_claim"] = claim
    curve = [
        {"phase": "train", "epoch": n, "loss": 0.7 / n, "ndcg": 0.1 + 0.02 * n}
        for n in range(1, epoch + 1)
    ]
    progress = {
        "phase": "train", "epoch": epoch, "epochs": 10, "eta_s": 30.0 - epoch, "curve": curve,
        "loss": curve[-1]["loss"], "ndcg": curve[-1]["ndcg"],
    }  # fmt: skip
    await jobs.heartbeat(claim, 10**9, progress)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, without a download: the system's."""
    path = shutil.which(CHROMIUM)
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With two versions and a training that runs."""
    yield from serve(tmp_path_factory.mktemp("site"), filled=True)


@pytest.fixture(scope="module")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With nothing in it."""
    yield from serve(tmp_path_factory.mktemp("empty"), filled=False)
