"""Exports: tables and lists of all users as files in the checkpoint store."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

from app.core.settings import Settings
from app.jobs.schemas import ExportParams, JobRow
from app.registry.exports import LocalExportStore, fetch_export
from app.registry.service import open_export_store
from app.wiring import Services
from app.worker.worker import Worker, build_worker
from ncr_core.errors import CheckpointError
from ncr_core.manifest import file_sha256
from tests.app.conftest import SMALL, add_small_data, children, thread_worker, until
from tests.conftest import ON_SQLITE

if TYPE_CHECKING:
    from tests.app.registry.conftest import ObjectStore

pytestmark = pytest.mark.anyio

NAMES = {"events", "items", "users", "preferences"}


async def run_export(services: Services, settings: Settings, **params: Any) -> JobRow:
    job_id = await services.jobs.submit_export(ExportParams.model_validate(params))
    exports = open_export_store(settings)
    assert await thread_worker(services, settings, exports=exports).run_once()
    return await services.jobs.get(job_id)


def folder_of(settings: Settings, job: JobRow) -> Path:
    assert (job.status, job.error) == ("succeeded", None)
    assert job.metrics is not None
    assert job.metrics["folder"] == f"exports/{job.job_id}"
    return settings.data_dir / "models" / job.metrics["folder"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


async def test_both_formats_hold_the_same_rows_as_the_service(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    odd = {"title": "ü", "attributes": {"a": [1, {"b": None}]}, "available_until": 2e9}
    odd["embedding"] = [0.5, -3]
    await services.catalog.put("odd\nitem", odd)
    await services.users.put("user-1", {"attributes": {"age": 30}})
    await services.catalog.delete("film-2")
    event = {"user": "new\u2028user", "item": "film-1", "type": "rating", "value": 2.5}
    await services.events.add_rows([event | {"event_id": "e", "timestamp": 0.000001}], 10**15)
    await services.events.add_preferences(
        [{"user": "user-1", "winner": "film-1", "loser": "film-3", "timestamp": 7}], 10**15
    )
    exported: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for form in ("jsonl", "parquet"):
        job = await run_export(services, settings, format=form)
        folder = folder_of(settings, job)
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            *(f"{name}.{form}" for name in NAMES),
        }
        assert job.metrics is not None
        for name, file in job.metrics["files"].items():
            path = folder / name
            assert file["sha256"] == file_sha256(path)
            assert (file["bytes"], file["rows"]) == (path.stat().st_size, len(rows_of(path)))
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["files"] == job.metrics["files"]
        assert manifest["as_of_seq"] == await services.events.last_seq()
        exported[form] = {name: rows_of(folder / f"{name}.{form}") for name in NAMES}
    lines, columns = exported["jsonl"], exported["parquet"]
    assert len(lines["events"]) == len(SMALL.interactions) + 1
    assert lines["events"][-1] == event | {
        "event_id": "e",
        "timestamp": "1970-01-01T00:00:00.000001Z",
        "recommendation_id": None,
    }
    assert lines["preferences"] == [
        {"user": "user-1", "winner": "film-1", "loser": "film-3"}
        | {"timestamp": "1970-01-01T00:00:07.000000Z"}
    ]
    assert [row["user"] for row in lines["users"]][-1] == "new\u2028user"
    assert len(lines["users"]) == 61
    items = [item async for chunk in services.catalog.iter_items() for item in chunk]
    assert [row["item"] for row in lines["items"]] == [item.id for item in items]
    assert lines["items"][-1]["attributes"] == {"a": [1, {"b": None}]}
    assert lines["items"][-1]["embedding"] == [0.5, -3]
    assert lines["items"][-1]["available_until"] == "2033-05-18T03:33:20.000000Z"
    (described,) = (row for row in lines["users"] if row["user"] == "user-1")
    assert described["attributes"] == {"age": 30}
    for name in NAMES:
        for line, row in zip(lines[name], columns[name], strict=True):
            for key, value in row.items():
                expected: Any
                if isinstance(value, datetime):
                    expected = value.isoformat(timespec="microseconds").replace("+00:00", "Z")
                else:
                    expected = json.loads(value) if key == "attributes" else value
                assert line[key] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "lists",
    [{}, {"n": 60, "exclude_seen": False}, {"n": 5, "category": [SMALL.items[0].genre]}],
)
async def test_lists_are_those_that_the_service_serves(
    app: FastAPI,
    client: httpx2.AsyncClient,
    trained: str,
    settings: Settings,
    lists: dict[str, Any],
) -> None:
    services: Services = app.state.services
    after = [("user-3", "film-9"), ("late", "film-4"), ("late", "film-5")]
    await services.events.add_rows([{"user": u, "item": i} for u, i in after], 10**15)
    # A user without events: what they did was deleted.
    await services.events.add_rows([{"user": "gone", "item": "film-1", "event_id": "x"}], 10**15)
    await services.events.delete_event("x")
    job = await run_export(services, settings, tables=[], lists=lists)
    assert job.metrics is not None
    assert job.metrics["model_version"] == trained
    assert job.model_version is None  # the job's row may go while the version's files stay
    rows = rows_of(folder_of(settings, job) / "lists.jsonl")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.pop("user"), []).append(row)
    users = [user async for chunk in services.events.iter_users() for user, *_ in chunk]
    answer = await client.post("/recommend/batch", json={"users": users} | lists)
    sources = set()
    without = 0
    for result in answer.json()["results"]:
        items = [
            {"item": item.pop("id"), **{k: v for k, v in item.items() if k != "title"}}
            for item in result["items"]
        ]
        sources |= {item["source"] for item in items}
        assert found.pop(result["user"], []) == items
        without += not items
    assert not found
    assert sources == {"model", "fold_in", "popular"}
    assert job.metrics["users_without_list"] == without


async def test_without_a_model_lists_are_the_popular_ones(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job = await run_export(services, settings, tables=["users"], lists={"n": 2}, format="parquet")
    rows = rows_of(folder_of(settings, job) / "lists.parquet")
    assert {row["source"] for row in rows} == {"popular"}
    assert len(rows) == 120
    assert (job.metrics or {})["model_version"] is None


@ON_SQLITE
async def test_a_model_that_cannot_be_loaded_fails_the_export(
    app: FastAPI, trained: str, settings: Settings
) -> None:
    services: Services = app.state.services
    for path in services.models.folder(trained).glob("*.safetensors"):
        path.write_bytes(b"damaged")
    job = await run_export(services, settings, lists={})
    assert job.status == "failed"
    assert "damaged" in str(job.error)
    assert list((settings.data_dir / "models" / "exports").iterdir()) == []


@pytest.mark.slow
@ON_SQLITE
async def test_exports_in_object_storage_are_uploaded_whole_and_fetched(
    objects: ObjectStore, services: Services, settings: Settings, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"checkpoint_store": objects.url})
    await add_small_data(services)
    job = await run_export(services, settings, tables=["events", "users"])
    assert job.status == "succeeded"
    prefix = f"exports/{job.job_id}"
    files = {f"{prefix}/{name}" for name in ("manifest.json", "events.jsonl", "users.jsonl")}
    assert {name for name in objects.names() if name.startswith("exports")} == files
    assert list((settings.data_dir / "models" / "exports").iterdir()) == []
    store = open_export_store(settings)
    manifest = fetch_export(store, job.job_id, tmp_path / "fetched")
    assert len(rows_of(tmp_path / "fetched/events.jsonl")) == manifest.files["events.jsonl"].rows
    objects.flip(f"{prefix}/users.jsonl")
    with pytest.raises(CheckpointError, match=r"users\.jsonl .* is damaged"):
        fetch_export(store, job.job_id, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    # Only exports go, by age, and nothing else below the prefix.
    objects.files.pipe_file(objects.path("exports/notes/mine.txt"), b"keep")
    assert store.remove_old(time.time() - 3600) == []
    assert store.remove_old(time.time() + 3600) == [job.job_id]
    left = {name for name in objects.names() if name.startswith("exports")}
    assert left == {"exports/notes/mine.txt"}


@ON_SQLITE
async def test_old_exports_are_removed_and_nothing_else(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    old = await run_export(services, settings, tables=["users"])
    new = await run_export(services, settings, tables=["users"])
    root = settings.data_dir / "models" / "exports"
    unfinished = root / f".{old.job_id}-0123456789ab"
    for folder in (root / "mine", unfinished):
        folder.mkdir()
    long_ago = time.time() - 8 * 86_400
    for path in (*root.iterdir(), *root.glob("*/*")):
        if new.job_id not in str(path):
            os.utime(path, (long_ago, long_ago))
    worker = build_worker(services)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    await until(lambda: not (root / old.job_id).exists() and not unfinished.exists())
    stop.set()
    await running
    assert {path.name for path in root.iterdir()} == {"mine", new.job_id}


@pytest.mark.slow
@ON_SQLITE
async def test_a_second_attempt_replaces_the_first_and_a_cancelled_export_leaves_nothing(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    store = LocalExportStore(settings.data_dir / "models")
    first = await run_export(services, settings, tables=["users"])
    with store.staging(first.job_id) as folder:
        (folder / "items.jsonl").write_text("{}\n")
        store.publish(first.job_id, folder)
    place = settings.data_dir / "models" / "exports" / first.job_id
    assert [path.name for path in place.iterdir()] == ["items.jsonl"]

    job_id = await services.jobs.submit_export(ExportParams())

    class CancelledLate(Worker):
        async def publish_export(self, *args: Any) -> None:
            assert place.with_name(job_id).exists()
            await services.jobs.cancel(job_id)
            await super().publish_export(*args)

    exports = open_export_store(settings)
    worker = CancelledLate(services.database, services.models, settings, exports=exports)
    assert await worker.run_once()
    assert (await services.jobs.get(job_id)).status == "cancelled"
    assert not place.with_name(job_id).exists()


@pytest.mark.slow
async def test_an_export_in_a_child_process_that_is_killed_fails_and_leaves_no_files(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_export(ExportParams.model_validate({"lists": {"n": 50}}))
    exports = open_export_store(settings)
    worker = Worker(services.database, services.models, settings, exports=exports)
    running = asyncio.create_task(worker.run_once())
    root = settings.data_dir / "models" / "exports"
    await until(lambda: root.exists() and any(root.glob(".*/events.jsonl")), 60)
    os.kill(children()[0], 9)
    assert await running
    job = await services.jobs.get(job_id)
    assert job.status == "failed"
    assert "SIGKILL" in str(job.error)
    assert list(root.iterdir()) == []


@pytest.mark.slow
async def test_an_export_that_is_cancelled_in_the_middle_leaves_no_files(
    services: Services, settings: Settings
) -> None:
    await add_small_data(services)
    job_id = await services.jobs.submit_export(ExportParams.model_validate({"lists": {"n": 50}}))
    exports = open_export_store(settings)
    other = settings.data_dir / "models" / "exports" / ".20200101-000000-00000000-0123456789ab"
    other.mkdir(parents=True)
    worker = Worker(services.database, services.models, settings, exports=exports)
    running = asyncio.create_task(worker.run_once())
    await until(lambda: any(other.parent.glob(f".{job_id}-*/events.jsonl")), 60)
    await services.jobs.cancel(job_id)
    assert await running
    assert (await services.jobs.get(job_id)).status == "cancelled"
    assert list(other.parent.iterdir()) == [other]  # of another job


async def test_requests_for_exports_are_checked(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/admin/export", json={"lists": {"n": 5}, "format": "parquet"})
    assert answer.status_code == 202
    job = (await client.get(answer.headers["location"])).json()
    assert (job["kind"], job["status"]) == ("export", "queued")
    assert job["params"]["tables"] == ["events", "items", "users", "preferences"]
    assert job["params"]["lists"] == {"n": 5, "exclude_seen": True, "category": []}
    for body in (
        {"format": "csv"},
        {"tables": ["keys"]},
        {"tables": []},
        {"tables": ["events"] * 5},
        {"lists": {"n": 0}},
        {"lists": {"n": 1001}},
        {"lists": {"category": ["a\0b"]}},
        {"lists": {"category": ["c"] * 65}},
        {"lists": {"category": ["c" * 129]}},
        {"rows": 1},
        [],
    ):
        answer = await client.post("/admin/export", json=body)
        assert answer.status_code == 422, body
        assert answer.headers["content-type"] == "application/problem+json"
    key = {"Idempotency-Key": "one"}
    users = {"tables": ["users"]}
    sent = [await client.post("/admin/export", json=users, headers=key) for _ in range(2)]
    assert len({answer.json()["job_id"] for answer in sent}) == 1
    other = await client.post("/admin/export", json={"tables": ["items"]}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_used")
    training = await client.post("/admin/train", headers=key)
    assert (training.status_code, training.json()["code"]) == (409, "idempotency_key_used")


async def test_a_full_queue_takes_no_export(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.service.MAX_QUEUED_EXPORTS", 1)
    assert (await client.post("/admin/export")).status_code == 202
    answer = await client.post("/admin/export")
    assert (answer.status_code, answer.json()["code"]) == (409, "queue_full")
    assert "exports are queued" in answer.json()["detail"]
    assert (await client.post("/admin/train")).status_code == 202
