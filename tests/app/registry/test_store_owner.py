"""Whose a checkpoint store is: its mark, and that nothing of others is removed there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.core.settings import Settings, load_settings
from app.core.tables import instance, instance_id
from app.jobs.schemas import TrainParams
from app.registry import service
from app.registry.checkpoint_store import MARK, ForeignStore, LocalCheckpointStore
from app.registry.object_store import RemoteCheckpointStore
from app.registry.retention import RetentionRule
from app.registry.service import ModelRegistry
from app.transfer.backup import write_backup
from app.transfer.restore import restore_backup
from app.wiring import Services, build_services
from ncr_core.errors import CheckpointError
from tests.app.conftest import QUICK, add_small_data, thread_worker
from tests.app.registry.conftest import ObjectStore, copies, write
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrWorker
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio

UNKNOWN, OTHER = "20251101-120000-00aa", "20251102-120000-00bb"
PARTS = (f".{UNKNOWN}-0123456789ab", f".{UNKNOWN}-0123456789ab-old")
PART_OF_CANDIDATES = f".{UNKNOWN}.candidates.safetensors-0123456789ab"
FOREIGN = (
    "photos/a.jpg", ".secrets/key", ".env", "notes.txt", "my-model/model.safetensors",
    "unfinished/x", ".staging-x/x", f"{UNKNOWN}-mine/x", f".{UNKNOWN}/x", f"{OTHER}.zip",
    "other.candidates.safetensors",
)  # fmt: skip


def root_of(services: Services) -> Path:
    return services.models.folder(UNKNOWN).parent


def put(root: Path, *names: str) -> None:
    """Files and their folders, of long ago."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        for each in (path, path.parent):
            if each != root:
                os.utime(each, (0, 0))


def names_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


async def become_another_database(services: Services) -> None:
    async with services.database.write() as conn:
        await conn.execute(instance.update().values(instance_id="another"))


async def test_sweep_removes_only_what_bears_the_names_of_the_service(
    services: Services,
) -> None:
    root = root_of(services)
    put(root, *FOREIGN)
    await services.models.claim_store()
    put(root, f"{UNKNOWN}/ids.json", *(f"{part}/ids.json" for part in PARTS), PART_OF_CANDIDATES)
    put(root, f"{UNKNOWN}.candidates.safetensors")
    with capture_logs() as logs:
        await services.models.sweep()
    assert names_in(root) == {*FOREIGN, MARK}
    removed = {
        line["path"] for line in logs if line["event"] == "removed from the checkpoint store"
    }
    ours = (UNKNOWN, *PARTS, PART_OF_CANDIDATES, f"{UNKNOWN}.candidates.safetensors")
    assert removed == {str(root / name) for name in ours}


@pytest.mark.slow
@ON_SQLITE
async def test_sweep_removes_only_versions_from_object_storage(
    settings: Settings, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MIN_LEFTOVER_SECONDS", -3600.0)
    for name in FOREIGN:
        objects.files.pipe_file(objects.path(name), b"somebody else's")
    remote = await build_services(settings.model_copy(update={"checkpoint_store": objects.url}))
    try:
        await remote.models.claim_store()
        put(root_of(remote), *FOREIGN)
        objects.files.pipe_file(objects.path(f"{UNKNOWN}/ids.json"), b"left over")
        await remote.models.sweep()
        assert objects.names() == {*FOREIGN, MARK}
        assert names_in(root_of(remote)) == {*FOREIGN, MARK}
    finally:
        await remote.close()


@pytest.mark.slow
@ON_SQLITE
async def test_a_worker_leaves_the_files_of_others_in_its_store(
    tmp_path: Path, services: Services
) -> None:
    shared = tmp_path / "shared"
    put(shared, *FOREIGN)
    env = {"NCR_DATA_DIR": str(tmp_path / "data"), "NCR_CHECKPOINT_STORE": str(shared)}
    worker = NcrWorker(env, tmp_path / "worker.log")
    with worker:
        pass
    put(shared, f"{UNKNOWN}/ids.json")
    with worker:
        wait_until(lambda: not (shared / UNKNOWN).exists(), 30, "the first sweep")
    assert names_in(shared) == {*FOREIGN, MARK}


async def test_the_store_of_another_database_is_refused_and_left_alone(services: Services) -> None:
    versions = await copies(services, 3)
    await services.models.claim_store()
    root = root_of(services)
    put(root, f"{UNKNOWN}/ids.json")
    await become_another_database(services)
    with pytest.raises(ForeignStore, match="another database") as refused:
        await services.models.claim_store()
    for says in (str(root), MARK, "NCR_CHECKPOINT_STORE"):
        assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    before = names_in(root)
    await services.models.sweep()
    rule = RetentionRule(newest=1, grace_seconds=0)
    registry = ModelRegistry(services.database, LocalCheckpointStore(root), rule)
    assert await registry.clean() == []
    assert names_in(root) == before
    assert (await registry.get(versions[0])).status == "published"


@pytest.mark.slow
@ON_SQLITE
async def test_object_storage_of_another_database_is_refused(
    settings: Settings, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "MIN_LEFTOVER_SECONDS", -3600.0)
    remote = await build_services(settings.model_copy(update={"checkpoint_store": objects.url}))
    try:
        RemoteCheckpointStore(objects.url, tmp_path / "elsewhere").mark("another")
        objects.files.pipe_file(objects.path(f"{UNKNOWN}/ids.json"), b"another's")
        before = objects.names()
        with pytest.raises(ForeignStore, match="s3://"):
            await remote.models.claim_store()
        await remote.models.sweep()
        assert objects.names() == before
    finally:
        await remote.close()


@pytest.mark.slow
def test_local_copies_of_another_database_are_not_pruned(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.registry.object_store.MIN_COPIES", 0)
    here = RemoteCheckpointStore(objects.url, tmp_path / "here")
    there = RemoteCheckpointStore(objects.url, tmp_path / "there")
    LocalCheckpointStore(tmp_path / "there").mark("another")
    here.mark("one")
    write(here, OTHER)
    here.publish(OTHER)
    write(there, UNKNOWN)
    os.utime(there.folder(UNKNOWN), (0, 0))
    there.fetch(OTHER)
    assert there.folder(UNKNOWN).is_dir()


async def test_a_store_of_an_older_release_is_taken_if_every_version_is_known(
    services: Services,
) -> None:
    versions = await copies(services, 3)
    root = root_of(services)
    async with services.database.write() as conn:  # its files are there while they are removed
        await conn.exec_driver_sql(
            f"UPDATE models SET status = 'deleted' WHERE version = '{versions[0]}'"
        )
    put(root, *FOREIGN)
    await services.models.claim_store()
    mark = json.loads((root / MARK).read_bytes())
    assert mark == {"database": await instance_id(services.database)}


async def test_a_store_with_some_unknown_versions_is_used_but_not_swept(
    services: Services,
) -> None:
    """A worker that was killed before the upgrade may have left one; so may another service."""
    version = (await copies(services, 1))[0]
    root = root_of(services)
    put(root, f"{UNKNOWN}/ids.json", f"{PARTS[0]}/ids.json")
    with pytest.raises(CheckpointError, match=f"{UNKNOWN}.*move them away") as error:
        await services.models.claim_store()
    assert not isinstance(error.value, ForeignStore)
    before = names_in(root)
    await services.models.sweep()
    assert names_in(root) == before
    shutil.rmtree(root / UNKNOWN)
    await services.models.sweep()
    assert (root / MARK).exists()
    assert not (root / PARTS[0]).exists()
    assert (root / version).is_dir()


async def test_a_new_database_is_refused_an_old_store_without_a_mark(services: Services) -> None:
    put(root_of(services), f"{UNKNOWN}/ids.json", f"{OTHER}/ids.json")
    before = names_in(root_of(services))
    with pytest.raises(
        ForeignStore, match="holds only model versions that this database does not know"
    ):
        await services.models.claim_store()
    await services.models.sweep()
    assert names_in(root_of(services)) == before


async def test_a_mark_that_names_no_database_keeps_everything(services: Services) -> None:
    await copies(services, 3)
    root = root_of(services)
    (root / MARK).write_text("x")
    before = names_in(root)
    rule = RetentionRule(newest=1, grace_seconds=0)
    registry = ModelRegistry(services.database, LocalCheckpointStore(root), rule)
    assert await registry.clean() == []
    await registry.claim_store(required=False)  # it warns
    assert names_in(root) == before


@ON_SQLITE
async def test_no_job_writes_into_the_store_of_another_database(
    services: Services, settings: Settings
) -> None:
    """It may have been away when the worker started."""
    LocalCheckpointStore(root_of(services)).mark("another")
    await add_small_data(services)
    job_id = await services.jobs.submit_training(TrainParams.model_validate(QUICK))
    assert await thread_worker(services, settings).run_once()
    job = await services.jobs.get(job_id)
    assert (job.status, names_in(root_of(services))) == ("failed", {MARK})
    assert "another database" in str(job.error)


async def test_processes_that_start_at_once_on_an_empty_folder_agree(services: Services) -> None:
    root = root_of(services)
    registries = [ModelRegistry(services.database, LocalCheckpointStore(root)) for _ in range(8)]
    await asyncio.gather(*(registry.claim_store() for registry in registries))
    assert [path.name for path in root.iterdir()] == [MARK]

    async def mark(owner: str) -> None:
        await asyncio.to_thread(LocalCheckpointStore(root.with_name("new")).mark, owner)

    await asyncio.gather(*(mark(f"database-{n}") for n in range(8)))
    (owner,) = LocalCheckpointStore(root.with_name("new")).owners().values()
    assert str(owner).startswith("database-")


@ON_SQLITE
async def test_a_damaged_mark_is_named_and_nothing_is_swept(services: Services) -> None:
    root = root_of(services)
    put(root, f"{UNKNOWN}/ids.json", MARK)
    with pytest.raises(CheckpointError, match=MARK):
        await services.models.claim_store()
    await services.models.sweep()
    assert names_in(root) == {f"{UNKNOWN}/ids.json", MARK}


@pytest.mark.slow
@ON_SQLITE
async def test_a_restore_takes_a_place_of_its_own_and_refuses_that_of_another_database(
    services: Services, tmp_path: Path
) -> None:
    from app.transfer.archive import Backup

    version = (await copies(services, 1))[0]
    await services.models.claim_store()
    await write_backup(services, tmp_path / "backup.zip")
    store = str(root_of(services))

    async def restore(folder: Path, **more: str) -> None:
        new = await build_services(load_settings(data_dir=folder, **more))
        try:
            with Backup(tmp_path / "backup.zip") as backup:
                await restore_backup(new, backup)
            mark = json.loads((root_of(new) / MARK).read_bytes())
            assert mark == {"database": await instance_id(new.database)}
            assert await instance_id(new.database) != await instance_id(services.database)
            assert (await new.models.get(version)).version == version
        finally:
            await new.close()

    await restore(tmp_path / "copy")
    with pytest.raises(ForeignStore, match="another database"):
        await restore(tmp_path / "moved", checkpoint_store=store)
    (root_of(services) / MARK).unlink()  # as the documents say, once the old database is gone
    await restore(tmp_path / "moved", checkpoint_store=store)
