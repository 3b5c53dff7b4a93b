"""Retention: which versions keep their files, and the removal of the others."""

from __future__ import annotations

import os

import pytest

from app.registry.checkpoint_store import MARK, CheckpointStore, LocalCheckpointStore
from app.registry.retention import RetentionRule, StoredVersion
from app.registry.schemas import Activation, ActivationChange, Status
from app.registry.service import ModelRegistry, open_checkpoint_store
from app.wiring import Services, build_services
from ncr_core.errors import CheckpointError
from tests.app.conftest import add_small_data, publish_model
from tests.app.registry.conftest import ObjectStore, copies
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.anyio

HOUR, DAY = 3600 * 10**6, 24 * 3600 * 10**6
NOW = 100 * DAY


def stored(*versions: str, age: int = 50 * DAY) -> list[StoredVersion]:
    """``p1`` is a published version and ``r2`` a rejected one; a later number is a newer one."""
    status: dict[str, Status] = {"p": "published", "r": "rejected"}
    return [StoredVersion(v[1:], status[v[0]], NOW - age) for v in versions]


def removed(
    versions: list[StoredVersion],
    active: str | None = None,
    previous: str | None = None,
    changes: tuple[ActivationChange, ...] = (),
    in_use: tuple[str, ...] = (),
    rule: RetentionRule | None = None,
) -> list[str]:
    activation = Activation(active, previous, 1)
    return sorted((rule or RetentionRule(2)).expired(versions, activation, changes, in_use, NOW))


def test_the_newest_versions_and_the_active_one_are_kept() -> None:
    versions = stored("p1", "p2", "p3", "p4", "p5")
    assert removed(versions) == ["1", "2", "3"]
    assert removed(versions, active="1") == ["2", "3"]
    assert removed(versions, active="1", previous="2") == ["3"]
    assert removed(versions, active="5", previous="4", in_use=("1", "3")) == ["2"]
    assert removed(versions, rule=RetentionRule(9)) == []


def test_rejected_versions_are_kept_for_some_days_and_not_counted() -> None:
    old, young = stored("r1", "r5", age=20 * DAY), stored("r6", age=2 * DAY)
    versions = [*old, *young, *stored("p2", "p3", "p4")]
    assert removed(versions) == ["1", "2", "5"]
    assert removed(versions, rule=RetentionRule(2, rejected_days=30)) == ["2"]
    assert removed(versions, rule=RetentionRule(2, rejected_days=1)) == ["1", "2", "5", "6"]
    assert removed(versions, active="1") == ["2", "5"]


def test_new_and_recently_active_versions_are_kept() -> None:
    versions = stored("p1", "p2", "p3", "p4")
    just = ActivationChange(9, "3", "1", "activated", None, NOW - HOUR // 2)
    earlier = ActivationChange(8, "1", "2", "activated", None, NOW - 2 * HOUR)
    rule = RetentionRule(1)
    assert removed(versions, active="3", changes=(earlier, just), rule=rule) == ["2"]
    assert removed(stored("p1", "p2", age=HOUR // 2), rule=rule) == []


def registry_with(
    services: Services,
    rule: RetentionRule,
    store: CheckpointStore | None = None,
    versions_in_use: tuple[str, ...] = (),
) -> ModelRegistry:
    async def in_use() -> tuple[str, ...]:
        return versions_in_use

    store = store or open_checkpoint_store(services.settings)
    return ModelRegistry(services.database, store, rule, versions_in_use=in_use)


async def test_clean_removes_files_and_keeps_metrics(services: Services) -> None:
    versions = await copies(services, 5)
    rule = RetentionRule(newest=1, grace_seconds=0)
    registry = registry_with(services, rule, versions_in_use=(versions[1],))
    for version in versions:
        registry.candidates_path(version).write_bytes(b"x")
    assert set(await registry.clean()) == {versions[0], versions[2]}
    assert await registry.clean() == []  # with several workers it is done once
    for version in versions:
        here = version in (versions[1], *versions[3:])
        row = await registry.get(version)
        assert registry.folder(version).is_dir() == here
        assert registry.candidates_path(version).exists() == here
        assert row.status == ("published" if here else "deleted")
        assert row.metrics["sampled"]
    assert (await registry.rollback()).version == versions[3]


async def test_clean_keeps_versions_that_were_active_within_the_hour(services: Services) -> None:
    versions = await copies(services, 4)
    registry = registry_with(services, RetentionRule(newest=1))
    async with services.database.write() as conn:  # as if they had been there for long
        await conn.exec_driver_sql("UPDATE models SET created_at = created_at - 86400000000")
    assert await registry.clean() == []  # each was active a moment ago
    async with services.database.write() as conn:
        await conn.exec_driver_sql("UPDATE activations SET at = 0")
    assert set(await registry.clean()) == set(versions[:2])


class BrokenStore(LocalCheckpointStore):
    """A store in which nothing can be removed."""

    def remove(self, version: str) -> None:
        raise CheckpointError("killed")


async def test_sweep_removes_the_files_that_a_killed_worker_left(services: Services) -> None:
    a, b, c = await copies(services, 3)
    rule = RetentionRule(newest=1, grace_seconds=0)
    registry = registry_with(services, rule)
    root = registry.folder(a).parent
    assert await registry_with(services, rule, BrokenStore(root)).clean() == [a]
    assert registry.folder(a).is_dir()
    registry.candidates_path(a).write_bytes(b"x")
    for version in (a, b, c):
        os.utime(registry.folder(version), (0, 0))
    await registry.sweep()
    assert not registry.folder(a).exists()
    assert not registry.candidates_path(a).exists()
    assert registry.folder(b).is_dir()
    assert registry.folder(c).is_dir()


@pytest.mark.slow
@ON_SQLITE
async def test_clean_removes_files_from_object_storage(
    services: Services, objects: ObjectStore
) -> None:
    settings = services.settings.model_copy(update={"checkpoint_store": objects.url})
    remote = await build_services(settings)
    store = open_checkpoint_store(settings)
    try:
        await add_small_data(remote)
        versions = [await publish_model(remote, seed=seed) for seed in (1, 2, 3)]
        await remote.models.activate(versions[1])
        await remote.models.activate(versions[2])
        for version in versions:
            await remote.models.upload(version)
            remote.models.candidates_path(version).write_bytes(b"x" * 8)
            store.publish_candidates(version)
        assert objects.files.exists(objects.path(f"{versions[0]}/evaluated.safetensors"))
        registry = registry_with(remote, RetentionRule(newest=1, grace_seconds=0), store)
        assert await registry.clean() == versions[:1]
        left = {path.split("/", 2)[2].split("/")[0] for path in objects.files.find(objects.bucket)}
        assert left == {
            name
            for version in versions[1:]
            for name in (version, f"{version}.candidates.safetensors")
        } | {MARK}
        assert not remote.models.folder(versions[0]).exists()
    finally:
        await remote.close()
