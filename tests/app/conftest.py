"""The service, built for a test: on either database, without a network, with small models."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from app.core.database import Database
from app.core.http_protocol import BoundedProtocol
from app.core.redis import RedisClient
from app.core.settings import Settings, load_settings, normalise_database_url
from app.core.tables import now_us
from app.events.schemas import NewEvent
from app.events.training_snapshot import take_snapshot
from app.jobs.repository import Claim
from app.jobs.schemas import TASK, JobRow, Task, TrainParams
from app.main import create_app
from app.registry.schemas import ModelRow
from app.training.pipeline import train_and_evaluate
from app.wiring import Services, build_services
from app.worker.child_process import Heartbeat, OnProgress, TrainingFailed, run_task
from app.worker.worker import Worker
from ncr_core.data import Interactions
from ncr_core.data.synthetic import SyntheticData, synthetic_catalogue
from ncr_core.errors import NcrError
from tests.cluster.servers import training_pids_of
from tests.conftest import BACKENDS, new_database

if TYPE_CHECKING:
    from tests.app.registry.conftest import ObjectStore

SMALL: SyntheticData = synthetic_catalogue(60, 50, 12)
QUICK: dict[str, Any] = {"model": "nbpr", "factors": 4, "epochs": 2}


async def add_small_data(services: Services, first_us: int = 0) -> None:
    """60 users and 50 items with their categories; the first event is at ``first_us``."""
    await services.catalog.upsert_rows(
        [{"id": i.id, "title": i.title, "categories": [i.genre]} for i in SMALL.items]
    )
    await services.events.import_rows(
        [
            NewEvent(f"{user} {item}", user, item, timestamp=first_us + order * 1_000_000)
            for user, item, order in SMALL.interactions
        ]
    )


def interactions_of(services: Services) -> Interactions:
    """What a training would read now."""
    with take_snapshot(services.settings, services.settings.trainings_folder) as snapshot:
        return snapshot.interactions()


async def publish_model(services: Services, **params: Any) -> str:
    """Trains on what is in the database and publishes, without a job; the new version."""
    wanted = TrainParams.model_validate(QUICK | params | {"force": True})
    last_seq = await services.events.last_seq()
    version = services.models.new_version()
    summary = _trained(interactions_of(services), wanted, services.models.folder(version))
    row = ModelRow(
        version=version,
        status="published",
        kind=str(wanted.model),
        factors=int(wanted.factors or 0),
        path=services.models.stored_path(version),
        checksum=summary["checksum"],
        trained_seq=last_seq,
        users=summary["users"],
        items=summary["items"],
        interactions=summary["interactions"],
        metrics=summary["metrics"],
        params=wanted.model_dump(),
        job_id=None,
        created_at=now_us(),
        activated_at=None,
    )
    await services.models.publish(row)
    return version


async def run_in_thread(
    task: Task,
    heartbeat: Heartbeat,
    heartbeat_seconds: float,
    stop: asyncio.Event,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Runs a task in a thread of this process: a child process takes seconds to start.

    For tests of what comes of jobs. The child process has its tests in test_child_process and
    test_worker. ``on_progress`` is called in the thread, which then goes on.
    """
    task = TASK.validate_json(task.model_dump_json())  # as through the pipe
    try:
        summary = await asyncio.to_thread(run_task, task, on_progress or (lambda progress: None))
    except NcrError as error:
        raise TrainingFailed(str(error)) from None
    through_the_pipe: dict[str, Any] = json.loads(json.dumps(summary))
    return through_the_pipe


def thread_worker(services: Services, settings: Settings, **collaborators: Any) -> Worker:
    """A worker whose jobs run in a thread of this process."""
    return Worker(
        services.database, services.models, settings, run_task=run_in_thread, **collaborators
    )


async def run_job_here(services: Services, settings: Settings, **params: Any) -> JobRow:
    """A quick training from its request to its end, by a `thread_worker`."""
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | params))
    assert await thread_worker(services, settings).run_once()
    return await services.jobs.get(job_id)


_own_models = tempfile.TemporaryDirectory(prefix="ncr-test-models-")
_kept = Path(_own_models.name)


@pytest.fixture(scope="session", autouse=True)
def _keep_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep trained models where all processes of the test run find them."""
    global _kept
    base = tmp_path_factory.getbasetemp()
    _kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models"


def _trained(interactions: Interactions, params: TrainParams, folder: Path) -> dict[str, Any]:
    """A training, or a copy of what the same one gave before: hundreds of tests want the same."""

    def train() -> dict[str, Any]:
        return train_and_evaluate(interactions, params, "cpu", folder, lambda progress: None)

    if interactions.feedback is not None:
        return train()
    key = hashlib.sha256(json.dumps(params.model_dump(), sort_keys=True).encode())
    for ids in (interactions.user_ids, interactions.item_ids):
        key.update(json.dumps(list(ids)).encode())
    for array in (interactions.indptr, interactions.items, interactions.weights):
        key.update(b"|" if array is None else b"|" + array.tobytes())
    kept = _kept / key.hexdigest()
    if not kept.exists():
        summary = train()
        _kept.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_kept) as new:
            shutil.copytree(folder, Path(new) / "model")
            (Path(new) / "summary.json").write_text(json.dumps(summary))
            with contextlib.suppress(OSError):  # another process was as quick
                Path(new).rename(kept)
                Path(new).mkdir()  # for its own end
        return summary  # of this very folder: the other process's has another checksum
    if not folder.exists():
        shutil.copytree(kept / "model", folder)
    kept_summary: dict[str, Any] = json.loads((kept / "summary.json").read_text())
    return kept_summary


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 15) -> None:
    """Waits for something that another task or process does."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if not isinstance(found, bool):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings for a database of the test's own. Tests refresh the model when they want it."""
    return load_settings(
        data_dir=tmp_path,
        database_url=database_url,
        event_group_ms=1,
        precompute_users=0,
        model_poll_seconds=600,
    )


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The migrated database by itself."""
    database = Database(normalise_database_url(database_url))
    yield database
    await database.close()


@pytest.fixture
async def empty(empty_database_url: str) -> AsyncIterator[Database]:
    """A database without a schema."""
    database = Database(normalise_database_url(empty_database_url))
    yield database
    await database.close()


@pytest.fixture
async def services(settings: Settings) -> AsyncIterator[Services]:
    """The features without the web."""
    services = await build_services(settings)
    yield services
    await services.close()


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[FastAPI]:
    """The running application."""
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the running application."""
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def redis(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisClient]:
    """A server's end of what servers share, connected."""
    redis = RedisClient(redis_url, redis_prefix)
    redis.start()
    await until(lambda: redis.available)
    yield redis
    await redis.close()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStore]:
    """An object store for the tests of a process."""
    from tests.app.registry.conftest import ObjectStore  # which imports from here

    store = ObjectStore()
    yield store
    store.stop()


@pytest.fixture
def objects(object_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A bucket of the test's own."""
    object_server.open(monkeypatch)
    yield object_server
    object_server.clear()


@pytest.fixture(scope="module", params=BACKENDS)
async def shared_client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client for a module's tests of requests that change nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with new_database(request.param, folder, request) as url:
        app = create_app(load_settings(data_dir=folder, database_url=url, precompute_users=0))
        async with app.router.lifespan_context(app), client_of(app) as client:
            yield client


def client_of(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    """A client with headers of its own."""
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://localhost", headers=headers
    )


@pytest.fixture
async def filled(app: FastAPI) -> Services:
    """With 60 users and 50 items, and no model."""
    services: Services = app.state.services
    await add_small_data(services)
    return services


@pytest.fixture
async def trained(app: FastAPI, filled: Services) -> str:
    """With a model that is served, too: its version."""
    version = await publish_model(filled, epochs=5)
    await app.state.recommend.models.refresh()
    return version


async def refresh(app: FastAPI) -> None:
    """Load the active model, as the server does by itself within a second."""
    await app.state.recommend.models.refresh()


async def run_job(services: Services, settings: Settings, **params: Any) -> JobRow:
    """A quick training from its request to its end, in a child process."""
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK | params))
    assert await Worker(services.database, services.models, settings).run_once()
    return await services.jobs.get(job_id)


def children() -> list[int]:
    """Child processes of a worker in this process."""
    return training_pids_of(os.getpid())


class LateWorker(Worker):
    """Publishes a model after something else has happened."""

    def __init__(
        self,
        services: Services,
        settings: Settings,
        happen: Callable[[], Awaitable[object]],
        **collaborators: Any,
    ) -> None:
        super().__init__(services.database, services.models, settings, **collaborators)
        self._happen = happen

    async def publish_model(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        await self._happen()
        await super().publish_model(claim, version, summary)


@contextlib.asynccontextmanager
async def listening(app: FastAPI, protocol: type[BoundedProtocol]) -> AsyncIterator[int]:
    """Run the application on a port of 127.0.0.1, which is given."""
    config = uvicorn.Config(
        app, port=0, http=protocol, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await asyncio.wait_for(task, 20)
