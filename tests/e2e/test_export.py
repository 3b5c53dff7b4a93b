"""An export whose worker is killed begins anew, and a command fetches its files."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from benchmarks.faults.setup import LEASE, SMALL, add_events, storage, wait_for
from tests.cluster.process import is_running, wait_until
from tests.cluster.servers import NcrServer, NcrWorker
from tests.cluster.topology import missing_programs
from tests.conftest import skip_or_fail
from tests.e2e.support import ncr

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.mark.parametrize("database", ["sqlite", POSTGRESQL])
def test_an_export_of_a_killed_worker_is_written_by_another(database: str, tmp_path: Path) -> None:
    if database == "postgresql" and (missing := missing_programs()):
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    with storage(database) as place:
        env = place.env(**LEASE)
        with (
            NcrServer(env, place.folder / "server.log") as server,
            httpx2.Client(base_url=server.url, timeout=30) as client,
        ):
            add_events(server.url)
            body = {"tables": ["events", "users"], "lists": {"n": 3}}
            job_id = client.post("/admin/export", json=body).json()["job_id"]
            early = ncr("jobs", "download", job_id, tmp_path / "out", **env)
            assert early.returncode != 0
            assert "its status is queued" in early.stderr
            with NcrWorker(env, place.folder / "worker-1.log") as first:
                wait_until(lambda: bool(first.training_pids()), 30, "child process")
                (child,) = first.training_pids()
                first.kill()
                wait_until(lambda: not is_running(child), 10, "end of the child process")
            with NcrWorker(env, place.folder / "worker-2.log") as second:
                job = wait_for(client, job_id, lambda job: job["status"] == "succeeded")
                assert job["attempt"] == 2
                assert second.terminate() == 0
        assert [path.name for path in place.folder.glob("var/models/exports/*")] == [job_id]
        done = ncr("jobs", "download", job_id, tmp_path / "out", **env)
        assert done.returncode == 0, done.stderr
        again = ncr("jobs", "download", job_id, tmp_path / "out", **env)
        assert again.returncode != 0
        assert "exists already" in again.stderr
    rows = {
        path.stem: [json.loads(line) for line in path.read_bytes().splitlines()]
        for path in (tmp_path / "out").glob("*.jsonl")
    }
    assert len(rows["events"]) == len(SMALL.interactions)
    assert len(rows["users"]) == 60
    assert len(rows["lists"]) == 180
    for name, found in rows.items():
        assert job["metrics"]["files"][f"{name}.jsonl"]["rows"] == len(found)
