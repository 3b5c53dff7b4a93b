"""Webhooks of real processes, one of which is killed while it delivers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from benchmarks.faults.setup import LEASE, storage
from tests.app.webhooks.conftest import SECRET, Receiver, assert_signed
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker
from tests.cluster.topology import missing_programs
from tests.conftest import skip_or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.parametrize("database", ["sqlite", POSTGRESQL])
def test_a_message_of_a_killed_worker_is_delivered_by_another(
    database: str, receiver: Receiver
) -> None:
    if database == "postgresql" and (missing := missing_programs()):
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    receiver.pause = 5.0
    with storage(database) as place:
        env = place.env(
            **LEASE,
            NCR_WEBHOOK_URLS=receiver.url,
            NCR_WEBHOOK_SECRET=SECRET,
            NCR_WEBHOOK_PRIVATE="true",
        )
        with (
            NcrServer(env, place.folder / "server.log") as server,
            httpx2.Client(base_url=server.url, timeout=30) as client,
        ):
            answer = client.post("/admin/export", json={"tables": ["users"]})
            job_id = answer.json()["job_id"]
            client.post(f"/admin/jobs/{job_id}/cancel").raise_for_status()
            with NcrWorker(env, place.folder / "worker-1.log") as first:
                wait_until(lambda: len(receiver.received) == 1, 20, "first delivery")
                first.kill()  # before the receiver answers
                receiver.pause = 0.0
            with NcrWorker(env, place.folder / "worker-2.log") as second:
                wait_until(lambda: len(receiver.received) == 2, 60, "second delivery")
                left = "SELECT count(*) FROM webhook_messages"
                wait_until(lambda: place.query(left) == [(0,)], 10, "end of the delivery")
                assert second.terminate() == 0
                assert SECRET not in second.log_text() + server.log_text()
    one, two = receiver.received
    assert one.headers["webhook-id"] == two.headers["webhook-id"]
    assert one.body == two.body
    assert two.message["data"]["job_id"] == job_id
    assert two.message["data"]["status"] == "cancelled"
    assert_signed(two)
