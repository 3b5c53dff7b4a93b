"""The compose topology as processes: two servers behind a proxy, two workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx2
import pytest

from benchmarks.faults import outages
from benchmarks.faults.setup import LEASE, LONG_TRAINING, SMALL, USER, submit, train, wait_for
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker, get_status
from tests.cluster.topology import Topology, missing_programs
from tests.conftest import skip_or_fail

pytestmark = [pytest.mark.e2e, pytest.mark.postgres]

SECONDS = 150  # for anything to happen


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    if missing := missing_programs():
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    # No second job after each training: who has a child is who trains.
    with Topology(env=LEASE) as topology:
        with client_of(topology) as client:
            for path, rows in (("/items", ITEMS), ("/events", EVENTS)):
                response = client.post(path, json=rows)
                assert response.status_code == 200, response.text
            assert response.json()["accepted"] == len(EVENTS)
        yield topology


@pytest.fixture(scope="module")
def trained(topology: Topology) -> Topology:
    """With a model that both servers serve."""
    with client_of(topology) as client:
        train(client, *(server.url for server in topology.servers))
    return topology


ITEMS = [{"id": i.id, "title": i.title, "categories": [i.genre]} for i in SMALL.items]
EVENTS = [
    {"event_id": f"{user} {item}", "user": user, "item": item, "timestamp": order + 1}
    for user, item, order in SMALL.interactions
]


def client_of(where: Topology | NcrServer) -> httpx2.Client:
    return httpx2.Client(base_url=where.url, timeout=30)


def get(client: httpx2.Client, path: str, **params: Any) -> dict[str, Any]:
    response = client.get(path, params=params)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_both_servers_serve_a_newly_trained_model(trained: Topology) -> None:
    for server in trained.servers:
        with client_of(server) as client:
            answer = get(client, f"/recommend/{USER}")
            assert {item["source"] for item in answer["items"]} == {"model"}


def test_an_event_posted_to_one_server_is_in_the_lists_of_the_other(trained: Topology) -> None:
    one, other = (client_of(server) for server in trained.servers)
    seen = {event["item"] for event in EVENTS if event["user"] == USER}
    unseen = [item["id"] for item in ITEMS if item["id"] not in seen][:2]
    with one, other:
        for n, item in enumerate(unseen):
            before = get(other, f"/recommend/{USER}", n=100)
            assert item in {entry["id"] for entry in before["items"]}
            posted = one.post("/events", json={"user": USER, "item": item})
            seq = posted.json()["last_seq"]
            if n == 0:
                after = get(other, f"/recommend/{USER}", n=100, min_seq=seq)
            else:  # by itself, a little later
                wait_until(
                    lambda seq=seq: get(other, f"/recommend/{USER}", n=100)["as_of_seq"] >= seq,  # type: ignore[misc]
                    SECONDS,
                    "the event",
                )
                after = get(other, f"/recommend/{USER}", n=100)
            assert after["as_of_seq"] >= seq
            assert item not in {entry["id"] for entry in after["items"]}


def test_events_of_many_users_are_seen_by_the_other_server(trained: Topology) -> None:
    values = outages.visibility(trained, 20)
    row = dict(zip(outages.VISIBILITY_COLUMNS, values, strict=True))
    assert row["missing with min_seq"] == 0


def errors_of(topology: Topology) -> list[str]:
    """What the servers have logged as errors; their logs are gone after the test."""
    lines = chain.from_iterable(server.log_text().splitlines() for server in topology.servers)
    return [line for line in lines if '"level": "error"' in line]


def test_service_survives_outages_of_redis_and_postgresql(trained: Topology) -> None:
    pace = outages.Pace(calm=0.5, away=1.0, back=2.0)
    for values in outages.run(trained, 1, pace):
        row = dict(zip(outages.COLUMNS, values, strict=True))
        is_right = row["wrong answers"] == row["other errors"] == row["of them lost"] == 0
        assert is_right, (row, errors_of(trained))
        assert row["answers"] > 50
        assert row["good answers from then on"] >= outages.MIN_GOOD_ANSWERS
        assert row["acknowledged events"] > 0
        # PostgreSQL was away; Redis may be.
        assert (row["503s"] > 0) == row["what"].startswith("postgres"), row


class Visitor(threading.Thread):
    """Asks and posts through the proxy, on one connection for as long as that is kept alive."""

    def __init__(self, topology: Topology, name: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.topology, self.user, self.stop = topology, name, stop
        self.posted = 0
        self.failed: list[str] = []

    def run(self) -> None:
        with client_of(self.topology) as client:
            while not self.stop.is_set() and not self.failed:
                event = {"user": self.user, "item": f"i-{self.posted}"}
                try:
                    answers = [client.post("/events", json=event), client.get(f"/recommend/{USER}")]
                except httpx2.TransportError as error:
                    self.failed.append(repr(error))
                    return
                self.posted += 1
                self.failed += [a.text for a in answers if a.status_code != 200]


def test_graceful_shutdown_fails_no_request(topology: Topology) -> None:
    first = topology.servers[0]
    stop, go_on = threading.Event(), threading.Event()
    visitors = [Visitor(topology, f"visitor {n}", stop) for n in range(4)]
    upload: list[httpx2.Response] = []

    def lines() -> Iterator[bytes]:
        yield b'{"user": "uploader", "item": "a"}\n'
        go_on.wait(SECONDS)
        yield b'{"user": "uploader", "item": "b"}\n'

    def send_slowly() -> None:
        with client_of(first) as client:
            headers = {"Content-Type": "application/x-ndjson"}
            upload.append(client.post("/events", content=lines(), headers=headers))

    uploader = threading.Thread(target=send_slowly, daemon=True)
    try:
        for thread in (*visitors, uploader):
            thread.start()
        wait_until(lambda: all(v.posted > 5 or v.failed for v in visitors), SECONDS, "visits")
        first.send(signal.SIGTERM)
        # It says so while it still answers: a balancer has the time to notice.
        wait_until(lambda: get_status(first.port, "/health/ready") != 200, SECONDS, "not ready")
        assert get_status(first.port, "/health/ready") == 503
        assert get_status(first.port, "/health/live") == 200
        wait_until(
            lambda: get_status(first.port, "/health/live") is None, SECONDS, "no new connections"
        )
        assert first.running
        go_on.set()
        assert first.wait() == 0, first.log_text()
        uploader.join(SECONDS)
        assert upload
        assert upload[0].status_code == 200, upload[0].text
        assert upload[0].json()["accepted"] == 2
        so_far = [visitor.posted for visitor in visitors]
        wait_until(
            lambda: all(
                v.posted > n + 5 or v.failed for v, n in zip(visitors, so_far, strict=True)
            ),
            SECONDS,
            "visits to the other server",
        )
    finally:
        stop.set()
        go_on.set()
        for visitor in visitors:
            visitor.join(SECONDS)
        if not first.running:
            first.start()
    assert [visitor.failed for visitor in visitors] == [[]] * len(visitors)
    with client_of(topology) as client:
        for visitor in visitors:
            events = get(client, f"/users/{visitor.user}/events", n=1000)["items"]
            assert len(events) == min(visitor.posted, 1000)


def test_job_of_a_killed_worker_is_taken_over(topology: Topology) -> None:
    with client_of(topology) as client:
        job_id = submit(client, **LONG_TRAINING)
        wait_for(client, job_id, lambda job: bool(job["progress"] and job["progress"]["epoch"]))
        holder, other = sorted(topology.workers, key=lambda worker: not worker.training_pids())
        assert holder.training_pids()
        assert not other.training_pids()
        try:
            holder.kill()
            wait_for(client, job_id, lambda job: job["attempt"] == 2 and bool(job["progress"]))
            assert other.training_pids()
            assert client.post(f"/admin/jobs/{job_id}/cancel").status_code < 300
            job = wait_for(client, job_id, lambda job: job["finished_at"] is not None)
            assert (job["status"], job["attempt"]) == ("cancelled", 2)
        finally:
            client.post(f"/admin/jobs/{job_id}/cancel")
            if not holder.running:
                holder.start()
    assert all(isinstance(worker, NcrWorker) and worker.running for worker in topology.workers)
