"""A few rounds of the long runs in benchmarks/faults: processes are killed, paused, cut off."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import disk_full, outages, server_kill, visibility, worker_kill
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
    found = server_kill.run(kind, 2)
    assert (found.lost, found.twice, found.half) == (0, 0, 0)
    assert found.idle == 0  # each time a list was under way
    assert found.rounds == 2


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_worker_killed_and_a_worker_stopped(kind: str) -> None:
    found = named(worker_kill.COLUMNS, worker_kill.run(kind, 2, 1))
    assert found["jobs"] == 3
    assert found["succeeded"] == 3
    assert found["taken up again"] >= 1
    assert found["most trainings at once"] == 1
    for nothing in ("half published", "served and unknown", "published twice", "failed answers"):
        assert found[nothing] == 0, nothing


def test_redis_and_postgresql_go_and_come_back() -> None:
    rows = [named(outages.COLUMNS, row) for row in outages.run(outages.KINDS, 1)]
    for row in rows:
        assert row["wrong answers"] == row["other errors"] == row["of them lost"] == 0, row
        assert row["answers"] > 50
        assert row["acknowledged events"] > 0
        if row["what"].startswith("redis"):
            assert row["503s"] == 0, row
    assert rows[-1]["503s"] > 0  # PostgreSQL was away


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


def test_an_event_is_seen_by_the_other_server() -> None:
    found = named(visibility.COLUMNS, visibility.run(20, redis=True))
    assert found["missing with min_seq"] == 0
