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

import numpy as np
import orjson
import pytest
import uvicorn
from fastapi import FastAPI

from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestRow
from app.all_tables import metadata
from app.cli.demo import SYNTHETIC_US
from app.core.http_protocol import BoundedProtocol
from app.core.ids import HOUR_MS, hour_now, random_hex
from app.core.settings import load_settings
from app.core.tables import now_us
from app.events.counts import EventCount
from app.jobs.repository import JobRepository
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import add_small_data, publish_model

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

CHROMIUM = os.environ.get("NCR_TEST_CHROMIUM", "chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ADMIN_KEY = "administrator-of-tests"
HOURS = 48
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
    ended_trial: str = ""
    running_trial: str = ""

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def serve(folder: Path, *, filled: bool, **more: Any) -> Iterator[Site]:
    """A service on SQLite: empty, or with two versions, trials and a training that runs."""
    started: Future[Site] = Future()

    async def main() -> None:
        settings = load_settings(
            data_dir=folder, precompute_users=0, model_poll_seconds=0.2, **more
        )
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
    await add_small_data(services, SYNTHETIC_US)
    for epochs in (5, 8):
        site.versions.append(await publish_model(services, epochs=epochs))
    await services.catalog.upsert_rows(
        [{"id": ODD_ITEM, "title": SCRIPT, "categories": [SCRIPT], "attributes": {"a": SCRIPT}}]
    )
    await services.events.add_rows([{"user": SCRIPT, "item": ODD_ITEM, "type": SCRIPT}], 1)
    await services.events.add_rows([{"user": "x"}], 1)
    site.user = str(await services.events.example_user())
    site.item = (await services.events.history(site.user, None, 1))[0][0][1]
    await add_activity(site)
    site.ended_trial = await add_trial(site, days_ago=7, lists=600, planned=400)
    await services.trials.end(site.ended_trial)
    site.running_trial = await add_trial(site, days_ago=1, lists=60, planned=800)
    jobs = JobRepository(services.database)
    site.job = await jobs.insert("train", {"recipe": "auto", "trigger": "request"})
    await report(site, 3)
    await site.app.state.recommend.models.refresh()


def others_of(site: Site) -> list[str]:
    """Users whose histories no story looks at."""
    return [user for n in range(1, 41) if (user := f"user-{n}") != site.user]


async def add_activity(site: Site) -> None:
    """Lists, clicks and rows of two days, and imports."""
    services, version, now = site.services, site.versions[1], hour_now()
    others = others_of(site)
    random = np.random.default_rng(0)
    events = []
    for back in range(HOURS):
        lists = int(40 + 25 * np.sin(back / 4) + random.integers(10))
        services.trials.impressions.add_lists(version, lists)
        unwritten = services.trials.impressions._new_lists
        unwritten[version, now - back] += unwritten.pop((version, now))
        for n in range(lists // 8):
            name = f"{version}.{(now - back) * HOUR_MS + n:x}.{random_hex(6)}"
            user = others[random.integers(len(others))]
            events.append({"user": user, "item": site.item, "recommendation_id": name})
    await services.events.add_rows(events, 0)
    await services.trials.flush()
    rows = [
        (now - back, "accepted", kind, int(each * (2 + np.sin(back / 4)) + random.integers(20)))
        for back in range(HOURS)
        for kind, each in (("view", 90), ("click", 40), ("purchase", 6))
    ]
    async with services.database.write() as conn:
        await conn.execute(
            metadata.tables["event_counts"]
            .insert()
            .values([dict(zip(EventCount._fields, row, strict=True)) for row in rows])
        )
    async with services.events.imports.record("command", "ratings.csv", "operator") as counts:
        counts.accepted, counts.duplicates = 98_412, 3
        counts.reject("the user is empty", 12)
        counts.reject("timestamp 'yesterday' is not a number", 2)
    async with services.events.imports.record("page", SCRIPT, "a1b2c3d4e5f6") as counts:
        counts.accepted, counts.problem = 1_200, "Reading stopped after 1,000 rejected rows."
        counts.reject("missing_user", 1_000)


async def add_trial(site: Site, days_ago: int, lists: int, planned: int) -> str:
    """An interleaving trial in which B is a little better."""
    repository = ABTestRepository(site.services.database)
    began = now_us() - days_ago * 24 * HOUR_MS * 1_000
    versions = (site.versions[1], site.versions[0])
    name = f"trial-of-{days_ago}-days"
    await repository.insert(
        ABTestRow(
            name,
            "interleaving",
            *versions,
            0.5,
            "running",
            began,
            None,
            None,
            planned_clicked=planned,
        )
    )
    known = (await site.services.catalog.catalogue()).internal_ids
    random = np.random.default_rng(days_ago)
    rows, events = [], []
    others = others_of(site)
    for n in range(lists):
        at = began + int(days_ago * 24 * HOUR_MS * 1_000 * (n + 0.5) / lists)
        shown = f"{name}.{at // 1_000:x}.{n:012x}"
        teams = orjson.dumps({"a": [known["film-1"]], "b": [known["film-2"]]}).decode()
        rows.append((shown, name, None, teams, at))
        item = "film-2" if random.random() < 0.56 else "film-1"
        events.append({"user": others[n % len(others)], "item": item, "recommendation_id": shown})
    await repository.add_impressions(rows)
    await site.services.events.add_rows(events, 0)
    return name


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
        "loss": curve[-1]["loss"], "ndcg": curve[-1]["ndcg"], "peak_bytes": 812 * 2**20,
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
def locked_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With nothing in it but a key."""
    yield from serve(tmp_path_factory.mktemp("locked"), filled=False, admin_key=ADMIN_KEY)


@pytest.fixture(scope="module")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With nothing in it."""
    yield from serve(tmp_path_factory.mktemp("empty"), filled=False)
