"""A round or two of the long runs in benchmarks/faults, on a service of their own.

Those that need the whole topology are in test_topology.
"""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from app.registry.checkpoint_store import MARK
from benchmarks.faults import disk_full, group_stop, rolling_upgrade, server_kill, worker_kill
from benchmarks.faults.setup import LEASE, LONG_TRAINING, add_events, storage, submit, wait_for
from tests.cluster.process import is_running, wait_until
from tests.cluster.servers import NcrServer, NcrWorker
from tests.cluster.topology import missing_programs
from tests.conftest import skip_or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRESQL])
def database(request: pytest.FixtureRequest) -> str:
    """PostgreSQL is one of the tests' own."""
    kind: str = request.param
    if kind == "postgresql" and (missing := missing_programs()):
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    return kind


def test_no_event_is_lost_or_doubled_when_a_server_is_killed(database: str) -> None:
    figures = server_kill.run(database, 1)
    assert figures["lost"] == figures["counted twice"] == figures["half stored"] == 0
    assert figures["rounds without an open list"] == 0
    assert figures["rounds"] == 1


def test_jobs_succeed_once_when_a_worker_is_killed_or_outlives_its_lease(database: str) -> None:
    kills, stops = (1, 0) if database == "sqlite" else (0, 1)
    # A training ends a fifth of the lease before another may begin: with time for that on a
    # machine that does much else. A kill that comes when the model is published proves little.
    values = worker_kill.run(database, kills, stops, lease="4", tries=5)
    row = dict(zip(worker_kill.COLUMNS, values, strict=True))
    assert row["succeeded"] == row["jobs"] == row["kills"] + stops
    assert row["held when killed"] == kills
    assert row["taken up again"] >= kills + stops
    assert row["most trainings at once"] == 1
    for nothing in ("half published", "served and unknown", "published twice", "failed answers"):
        assert row[nothing] == 0, nothing


def test_jobs_succeed_after_a_stop_of_all_processes_of_a_service(database: str) -> None:
    figures = group_stop.run(database, 3)
    assert figures["stops"] == figures["jobs"] == figures["succeeded"]
    assert figures["held when stopped"] > figures["stops"] / 2
    assert figures["of them to a stopped group"] == 0
    assert figures["exit codes other than 0"] == figures["children left"] == 0


@pytest.mark.postgres
def test_no_request_fails_in_a_rolling_upgrade_and_downgrade() -> None:
    if missing := missing_programs():
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    figures, _ = rolling_upgrade.run(1, rolling_upgrade.SHORT, model=False)
    assert figures["replacements"] == 3
    assert figures["lists"] > 100 < figures["events"]
    assert figures["looks"] > 20
    for nothing in ("failed", "lost", "counted twice", "looks without a ready server"):
        assert figures[nothing] == 0, nothing


# On PostgreSQL: in test_topology.
def test_the_training_of_a_killed_worker_ends_and_another_worker_claims_the_job() -> None:
    with storage("sqlite") as place:
        env = place.env(**LEASE)
        workers = [NcrWorker(env, place.folder / f"worker-{n}.log") for n in (1, 2)]
        with (
            NcrServer(env, place.folder / "server.log") as server,
            httpx2.Client(base_url=server.url, timeout=30) as client,
            workers[0] as first,
        ):
            add_events(server.url)
            job_id = submit(client, **LONG_TRAINING)
            wait_for(client, job_id, lambda job: bool(job["progress"] and job["progress"]["epoch"]))
            (training,) = first.training_pids()
            first.kill()
            wait_until(lambda: not is_running(training), 10, "end of the training")
            with workers[1] as second:
                restarted = wait_for(
                    client, job_id, lambda job: job["attempt"] == 2 and bool(job["progress"])
                )
                assert restarted["status"] == "running"
                client.post(f"/admin/jobs/{job_id}/cancel").raise_for_status()
                job = wait_for(client, job_id, lambda job: job["status"] == "cancelled")
                assert job["attempt"] == 2
                assert second.terminate() == 0
            assert [path.name for path in place.folder.glob("var/models/*")] == [MARK]


def test_a_full_disk_loses_nothing_and_the_old_model_is_served() -> None:
    if not disk_full.may_mount():
        pytest.skip("only root may mount a small disk")
    rows: list[dict[str, Any]] = [
        dict(zip(disk_full.COLUMNS, row, strict=True)) for row in disk_full.run()
    ]
    assert rows[0]["refused"] > 0
    for row in rows:
        assert row["of them lost"] == row["left behind"] == 0
        assert row["old model served"]
        assert row["works again"]
        assert row["damage"] == "none"
