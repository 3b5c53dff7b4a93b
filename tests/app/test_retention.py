"""Which versions keep their files, and that nothing is removed that somebody needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from app.models.history import Change
from app.models.retention import Rule, Stored
from app.models.schemas import Activation
from app.services import Services, build_services
from ncr_core.errors import CheckpointError
from tests.app.models import add_small_data, publish_model
from tests.app.object_store import ObjectStore
from tests.app.test_activations import copies

pytestmark = pytest.mark.anyio

HOUR, DAY = 3600 * 10**6, 24 * 3600 * 10**6
NOW = 100 * DAY


def stored(*versions: str, age: int = 50 * DAY) -> list[Stored]:
    """``p1`` is a published version and ``r2`` a rejected one; a later number is a newer one."""
    status = {"p": "published", "r": "rejected"}
    return [Stored(v[1:], status[v[0]], NOW - age) for v in versions]


def removed(
    versions: list[Stored],
    active: str | None = None,
    previous: str | None = None,
    changes: tuple[Change, ...] = (),
    in_use: tuple[str, ...] = (),
    rule: Rule | None = None,
) -> list[str]:
    activation = Activation(active, previous, 1)
    return sorted((rule or Rule(2)).to_remove(versions, activation, changes, in_use, NOW))


def test_the_newest_and_those_that_are_served_are_kept() -> None:
    versions = stored("p1", "p2", "p3", "p4", "p5")
    assert removed(versions) == ["1", "2", "3"]
    assert removed(versions, active="1") == ["2", "3"]
    assert removed(versions, active="1", previous="2") == ["3"]
    assert removed(versions, active="5", previous="4", in_use=("1", "3")) == ["2"]
    assert removed(versions, rule=Rule(9)) == []


def test_rejected_versions_are_kept_for_some_days_and_not_counted() -> None:
    old, young = stored("r1", "r5", age=20 * DAY), stored("r6", age=2 * DAY)
    versions = [*old, *young, *stored("p2", "p3", "p4")]
    assert removed(versions) == ["1", "2", "5"]
    assert removed(versions, rule=Rule(2, rejected_days=30)) == ["2"]
    assert removed(versions, rule=Rule(2, rejected_days=1)) == ["1", "2", "5", "6"]
    assert removed(versions, active="1") == ["2", "5"]


def test_what_is_new_or_was_served_a_moment_ago_is_kept() -> None:
    versions = stored("p1", "p2", "p3", "p4")
    just = Change(9, "3", "1", "activated", None, NOW - HOUR // 2)
    earlier = Change(8, "1", "2", "activated", None, NOW - 2 * HOUR)
    rule = Rule(1)
    assert removed(versions, active="3", changes=(earlier, just), rule=rule) == ["2"]
    assert removed(stored("p1", "p2", age=HOUR // 2), rule=rule) == []


async def test_files_go_and_figures_stay(services: Services) -> None:
    versions = await copies(services, 5)
    registry = services.models
    for version in versions:
        registry.candidates_path(version).write_bytes(b"x")
    registry._retention = Rule(newest=1, grace_seconds=0)

    async def trial() -> set[str]:
        return {versions[1]}

    registry.in_use.append(trial)
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


async def test_nothing_is_removed_within_the_hour(services: Services) -> None:
    versions = await copies(services, 4)
    services.models._retention = Rule(newest=1)
    async with services.database.write() as conn:  # as if they had been there for long
        await conn.exec_driver_sql("UPDATE models SET created_at = created_at - 86400000000")
    assert await services.models.clean() == []  # each was served a moment ago
    async with services.database.write() as conn:
        await conn.exec_driver_sql("UPDATE activations SET at = 0")
    assert set(await services.models.clean()) == set(versions[:2])


async def test_a_worker_that_was_killed_in_between(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry has said so, and the files are there: a sweep finds them."""
    a, b, c = await copies(services, 3)
    registry = services.models
    registry._retention = Rule(newest=1, grace_seconds=0)

    def fails(version: str) -> None:
        raise CheckpointError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(registry._store, "remove", fails)
        assert await registry.clean() == [a]
    assert registry.folder(a).is_dir()
    registry.candidates_path(a).write_bytes(b"x")
    for version in (a, b, c):
        os.utime(registry.folder(version), (0, 0))
    await registry.sweep()
    assert not registry.folder(a).exists()
    assert not registry.candidates_path(a).exists()
    assert registry.folder(b).is_dir()
    assert registry.folder(c).is_dir()


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store = ObjectStore(monkeypatch)
    try:
        yield store
    finally:
        store.clear()


async def test_files_go_from_object_storage_too(services: Services, objects: ObjectStore) -> None:
    settings = services.settings.model_copy(update={"checkpoint_store": objects.url})
    remote = await build_services(settings)
    try:
        await add_small_data(remote)
        versions = [await publish_model(remote, seed=seed) for seed in (1, 2, 3)]
        await remote.models.activate(versions[1])
        await remote.models.activate(versions[2])
        for version in versions:
            await remote.models.upload(version)
            remote.models.candidates_path(version).write_bytes(b"x" * 8)
            remote.models._store.publish_candidates(version)
        assert objects.files.exists(objects.path(f"{versions[0]}/evaluated.safetensors"))
        remote.models._retention = Rule(newest=1, grace_seconds=0)
        assert await remote.models.clean() == versions[:1]
        left = {path.split("/", 2)[2].split("/")[0] for path in objects.files.find(objects.bucket)}
        assert left == {
            name
            for version in versions[1:]
            for name in (version, f"{version}.candidates.safetensors")
        }
        assert not remote.models.folder(versions[0]).exists()
    finally:
        await remote.close()
