"""A round or two of the long runs in benchmarks/faults, on a service of their own.

Those that need the whole topology are in test_topology.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import disk_full, server_kill, worker_kill
from deploy.topology import missing_programs
from tests.conftest import skip_or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.postgres]


@pytest.fixture(autouse=True)
def programs() -> None:
    """PostgreSQL and Redis of the tests' own."""
    if missing := missing_programs():
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")


def named(columns: list[str], row: list[Any]) -> dict[str, Any]:
    return dict(zip(columns, row, strict=True))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_server_killed_while_it_takes_events(kind: str) -> None:
    found = server_kill.run(kind, 1)
    assert (found.lost, found.twice, found.half) == (0, 0, 0)
    assert found.idle == 0  # a list was under way
    assert found.rounds == 1


# Workers killed in the midst of training are in test_crash and in test_topology.
@pytest.mark.parametrize(
    ("kind", "kills", "stops"), [("sqlite", 1, 0), ("postgresql", 0, 1)], ids=["killed", "stopped"]
)
def test_a_worker_killed_while_it_publishes_or_stopped_past_its_lease(
    kind: str, kills: int, stops: int
) -> None:
    # A training ends a fifth of the lease before another may begin: with time for that on a
    # machine that does much else. A kill that comes when the model is published proves little.
    found = named(worker_kill.COLUMNS, worker_kill.run(kind, kills, stops, lease="4", tries=5))
    assert found["succeeded"] == found["jobs"] == found["kills"] + stops
    assert found["held when killed"] == kills
    assert found["taken up again"] >= kills + stops
    assert found["most trainings at once"] == 1
    for nothing in ("half published", "served and unknown", "published twice", "failed answers"):
        assert found[nothing] == 0, nothing


def test_a_full_disk() -> None:
    if not disk_full.may_mount():
        pytest.skip("only root may mount a small disk")
    committing, publishing = (named(disk_full.COLUMNS, row) for row in disk_full.run())
    assert committing["refused"] > 0
    for row in (committing, publishing):
        assert row["of them lost"] == row["left behind"] == 0
        assert row["old model served"]
        assert row["works again"]
        assert row["damage"] == "none"
