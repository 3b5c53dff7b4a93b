"""Workers and servers that share nothing but the database and an object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core.errors import Conflict
from app.core.settings import Settings
from app.inference import model_manager
from app.inference.model_manager import ModelManager
from app.inference.precomputed import PrecomputedCandidates
from app.jobs.repository import Claim
from app.jobs.schemas import TrainParams
from app.main import create_app
from app.registry import object_store, service
from app.registry.checkpoint_store import MARK
from app.registry.service import open_checkpoint_store
from app.wiring import Services, build_services
from app.worker.worker import Worker
from ncr_core.checkpoint import load_checkpoint
from ncr_core.errors import CheckpointError
from tests.app.conftest import QUICK, add_small_data, client_of, publish_model
from tests.app.registry.conftest import SECRET, ObjectStore, contents, write
from tests.conftest import ON_POSTGRESQL, ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ORPHAN = "20261101-120000-00aa"


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CANDIDATES_POLL_SECONDS", 0.0)
    monkeypatch.setattr(model_manager, "RETRY_SECONDS", 0.0)


@pytest.fixture
async def here(settings: Settings, objects: ObjectStore) -> AsyncIterator[Services]:
    """The machine of a worker, with data."""
    services = await build_services(at(settings, "here", objects))
    await add_small_data(services)
    yield services
    await services.close()


@pytest.fixture
async def there(
    settings: Settings, objects: ObjectStore, here: Services
) -> AsyncIterator[Services]:
    """The machine of a server."""
    services = await build_services(at(settings, "there", objects))
    yield services
    await services.close()


@pytest.fixture
def host(there: Services) -> ModelManager:
    return ModelManager(there.models, there.settings)


def at(settings: Settings, machine: str, objects: ObjectStore) -> Settings:
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir / machine,
            "checkpoint_store": objects.url,
            # A machine that stands still for 1.6 s would lose a lease of 2 s, and the test its job.
            "job_lease_seconds": 5.0,
            "precompute_users": 40,
        }
    )


async def publish(services: Services, **params: Any) -> str:
    version = await publish_model(services, **params)
    await services.models.upload(version)
    return version


def serves(host: ModelManager) -> str | None:
    return None if host.current is None else host.current.version


@ON_POSTGRESQL
async def test_a_model_trained_on_one_machine_is_served_on_another(
    here: Services, there: Services, host: ModelManager, objects: ObjectStore
) -> None:
    job_id = await here.jobs.submit_training(TrainParams.model_validate(QUICK))
    worker = Worker(here.database, here.models, here.settings)
    phases: list[str] = []
    assert await worker.run_once(on_progress=lambda p: phases.append(p["phase"]))
    assert phases[-2:] == ["write checkpoint", "upload"]
    job = await here.jobs.get(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    version = str(job.model_version)
    await host.refresh()
    assert (serves(host), host.refused) == (version, None)
    assert host.current is not None
    assert host.current.engine.retriever.precomputed is None

    assert await worker.run_once()  # the candidates, which come after the model
    await host.refresh()
    found = host.current.engine.retriever.precomputed
    assert isinstance(found, PrecomputedCandidates)
    assert len(found) == 40
    folder = await there.models.local_folder(version)
    assert contents(folder) == contents(here.models.folder(version))
    assert there.settings.data_dir in folder.parents
    assert objects.names() == {
        MARK,
        f"{version}.candidates.safetensors",
        *(f"{version}/{name}" for name in contents(folder)),
    }


@ON_SQLITE
async def test_a_damaged_version_is_refused_and_the_old_one_stays(
    here: Services, there: Services, host: ModelManager, objects: ObjectStore
) -> None:
    first = await publish(here, seed=1)
    await host.refresh()
    second = await publish(here, seed=2)
    name = f"{second}/model.safetensors"
    whole = objects.flip(name)
    await host.refresh()
    assert serves(host) == first
    assert "damaged in the store" in str(host.refused)
    with pytest.raises(Conflict, match="damaged") as caught:
        await there.models.activate(second)
    assert caught.value.code == "checkpoint_damaged"
    objects.files.pipe_file(objects.path(name), whole)
    await host.refresh()
    assert (serves(host), host.refused) == (second, None)


@ON_SQLITE
async def test_servers_keep_their_model_while_the_store_is_away(
    here: Services, there: Services, host: ModelManager, objects: ObjectStore
) -> None:
    first = await publish(here, seed=1)
    await host.refresh()
    second = await publish(here, seed=2)
    objects.stop()
    await host.refresh()
    assert serves(host) == first
    assert "cannot be reached" in str(host.refused)
    assert SECRET not in str(host.refused)
    await there.models.activate(first)  # what has been fetched needs no store
    await host.refresh()
    assert (serves(host), host.refused) == (first, None)
    await there.models.sweep()
    await there.models.discard(ORPHAN)
    await here.models.activate(second)
    objects.start()
    await host.refresh()
    assert (serves(host), host.refused) == (second, None)


@ON_SQLITE
async def test_activation_while_the_store_is_away_is_503(
    here: Services, settings: Settings, objects: ObjectStore
) -> None:
    first, second = await publish(here, seed=1), await publish(here, seed=2)
    await here.models.activate(first)
    app = create_app(at(settings, "there", objects))
    async with app.router.lifespan_context(app), client_of(app) as client:
        host: ModelManager = app.state.recommend.models
        await host.refresh()
        objects.stop()
        for path in (f"{second}/activate", "rollback"):
            response = await client.post(f"/admin/models/{path}")
            assert (response.status_code, response.json()["code"]) == (503, "store_unavailable")
            assert int(response.headers["Retry-After"]) >= 1
            assert SECRET not in response.text
        await host.refresh()
        answer = (await client.get("/recommend/user-1")).json()
        assert (answer["model_version"], host.refused) == (first, None)
        objects.start()
        response = await client.post(f"/admin/models/{second}/activate")
        assert (response.status_code, response.json()["active"]) == (200, True)


@ON_SQLITE
async def test_a_damaged_local_copy_is_fetched_again(
    here: Services, there: Services, objects: ObjectStore
) -> None:
    version = await publish(here)
    row = await there.models.get(version)
    good = contents(await there.models.local_folder(version))
    folder = there.models.folder(version)
    for name in good:
        (folder / name).write_bytes(b"rotten")
        if name.startswith("evaluated"):  # read where versions are compared, not to serve
            await there.models.local_folder(version)
        else:
            await there.models.load(row, "cpu")
        assert contents(folder) == good
        (folder / name).unlink()
        assert contents(await there.models.local_folder(version)) == good
    objects.flip(f"{version}/ids.json")
    (folder / "ids.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="damaged in the store"):
        await there.models.load(row, "cpu")


@ON_SQLITE
@pytest.mark.parametrize(
    "change",
    [
        {"path": "models/../../elsewhere"},
        {"path": "/etc"},
        {"path": f"models/{ORPHAN}"},
        {"version": "../elsewhere", "path": "models/../elsewhere"},
    ],
)
async def test_a_row_with_a_path_outside_the_store_is_refused(
    services: Services, change: dict[str, Any]
) -> None:
    await add_small_data(services)
    host = ModelManager(services.models, services.settings)
    first = await publish_model(services)
    await host.refresh()
    row = (await services.models.get(first))._replace(
        version=services.models.new_version()
    )._replace(**change)  # fmt: skip
    outside = services.settings.data_dir / "elsewhere"
    services.models.folder(first).rename(outside)  # whole, and yet not to be loaded
    load_checkpoint(outside)
    await services.models.publish(row)
    await host.refresh()
    assert serves(host) == first
    assert "not" in str(host.refused)
    with pytest.raises(CheckpointError, match=r"not in the store|not a version"):
        await services.models.load(row, "cpu")
    with pytest.raises(CheckpointError, match=r"not in the store|not a version"):
        await services.models.local_folder(row.version)


@ON_SQLITE
async def test_sweep_removes_folders_without_a_version_everywhere(
    here: Services, there: Services, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await publish(here)
    for machine in (here, there):
        await machine.models.claim_store()
    write(open_checkpoint_store(here.settings), ORPHAN)
    await here.models.upload(ORPHAN)
    await there.models.sweep()
    assert any(name.startswith(ORPHAN) for name in objects.names())  # young
    monkeypatch.setattr(service, "MIN_LEFTOVER_SECONDS", -3600.0)
    await there.models.sweep()
    assert {name.partition("/")[0] for name in objects.names()} == {version, MARK}
    await here.models.sweep()
    root = here.models.folder(version).parent
    assert {path.name for path in root.iterdir()} == {version, MARK}


@ON_SQLITE
async def test_an_upload_is_retried_until_the_store_is_back(
    here: Services, host: ModelManager, objects: ObjectStore
) -> None:
    objects.stop()
    uploading, running, job_id = await _train_until_upload(here)
    await asyncio.wait_for(uploading.wait(), 120)
    objects.start()
    assert await asyncio.wait_for(running, 60)
    job = await here.jobs.get(job_id)
    assert (job.status, job.error) == ("succeeded", None)
    await host.refresh()
    assert serves(host) == job.model_version


@ON_SQLITE
@pytest.mark.parametrize("what", ["lost", "cancelled", "given up"])
async def test_a_job_that_ends_while_uploading_leaves_nothing(
    here: Services, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Heartbeats go on meanwhile, or the worker would not get to know."""
    if what == "given up":
        monkeypatch.setattr("app.worker.worker.UPLOAD_LEASES", 0)
    objects.stop()
    uploading, running, job_id = await _train_until_upload(here)
    await asyncio.wait_for(uploading.wait(), 120)
    if what == "lost":
        await _taken_by_another(here, job_id)
    if what == "cancelled":
        await here.jobs.cancel(job_id)
    assert await asyncio.wait_for(running, 60)
    job = await here.jobs.get(job_id)
    status = {"lost": "running", "cancelled": "cancelled", "given up": "failed"}[what]
    assert job.status == status
    assert ("cannot be reached" in str(job.error)) == (what == "given up")
    assert (await here.models.activation()).version is None
    assert not list((here.settings.data_dir / "models").iterdir())
    objects.start()
    assert objects.names() == set()


async def _train_until_upload(
    services: Services,
) -> tuple[asyncio.Event, asyncio.Task[bool], str]:
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    uploading = asyncio.Event()
    worker = Worker(services.database, services.models, services.settings)

    def watch(progress: dict[str, Any]) -> None:
        if progress["phase"] == "upload":
            uploading.set()

    return uploading, asyncio.create_task(worker.run_once(on_progress=watch)), job_id


async def _taken_by_another(services: Services, job_id: str) -> None:
    """As when this worker was paused for longer than its lease."""
    jobs = services.jobs._repository
    held = (await jobs.get(job_id)).attempt  # type: ignore[union-attr]
    async with services.database.write() as conn:
        await conn.exec_driver_sql(f"UPDATE jobs SET lease_until = 0 WHERE job_id = '{job_id}'")
    claim = await jobs.claim("another", 60_000_000, 3)
    assert isinstance(claim, Claim)
    assert (claim.job_id, claim.attempt) == (job_id, held + 1)
