"""The whole story over real HTTP, by `ncr serve --with-worker`, and the integration page, run."""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.app.conftest import SMALL
from tests.e2e.support import Service, ncr

pytestmark = pytest.mark.e2e


class Loop:
    """Requests all the time, in the background; what went wrong is in `failures`."""

    def __init__(self, service: Service) -> None:
        self._url = service.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.failures: list[str] = []
        self.versions: set[str | None] = set()

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.is_set():
                try:
                    response = client.get(f"/recommend/user-{self.answered % 60 + 1}")
                    if response.status_code != 200 or len(response.json()["items"]) != 10:
                        self.failures.append(response.text)
                    self.versions.add(response.json()["model_version"])
                except Exception as error:
                    self.failures.append(repr(error))
                self.answered += 1
                self._stop.wait(0.01)  # or the training would come to nothing on two cores


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder into which the small catalogue was imported by the command."""
    source = tmp_path_factory.mktemp("source")
    with (source / "ratings.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "position"])
        rows.writerows(SMALL.interactions)
    with (source / "items.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["item", "title", "genres"])
        rows.writerows((i.id, i.title, i.genre) for i in SMALL.items)
    folder = tmp_path_factory.mktemp("var")
    for expected in (f"{len(SMALL.interactions)} events added", "0 events added"):
        done = ncr("import", source, data_dir=folder)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    return folder


@pytest.fixture(scope="module")
def service(imported: Path) -> Iterator[Service]:
    with Service(imported) as service:
        yield service


def test_events_training_and_lists_of_a_whole_service(service: Service) -> None:
    # Before any model: the popular, with titles.
    first = service.recommend("user-1")
    assert {item["source"] for item in first["items"]} == {"popular"}
    assert all(item["title"].startswith("The ") for item in first["items"])

    job = service.train()
    assert job["status"] == "succeeded", job
    service.wait_for(job["model_version"])
    personal = service.recommend("user-1")
    assert {item["source"] for item in personal["items"]} == {"model"}

    # Twenty events: none of those items comes again, and posting them again adds nothing.
    posted = [item["id"] for item in service.recommend("user-1", n=20)["items"]]
    events = [{"event_id": f"e{n}", "user": "user-1", "item": i} for n, i in enumerate(posted)]
    result = service.post("/events", events)
    assert (result["accepted"], result["duplicates"], result["rejected"]) == (20, 0, [])
    following = service.recommend("user-1", min_seq=result["last_seq"])
    assert following["as_of_seq"] >= result["last_seq"]
    assert not {item["id"] for item in following["items"]} & set(posted)
    again = service.post("/events", events)
    assert (again["accepted"], again["duplicates"]) == (0, 20)
    assert again["last_seq"] == result["last_seq"]

    # Retraining while requests run without a pause: all are answered, by one model or the other.
    with Loop(service) as loop:
        second = service.train()
        assert second["status"] == "succeeded", second
        service.wait_for(second["model_version"])
        time.sleep(0.3)
    assert loop.failures == []
    assert loop.answered > 20
    assert loop.versions == {job["model_version"], second["model_version"]}
    assert len(second["phases"]) > 1  # its progress moved
    model = service.client.get(f"/admin/models/{second['model_version']}").json()
    assert model["active"] is True
    assert model["trained_seq"] == result["last_seq"]
    assert {i["source"] for i in service.recommend("user-1")["items"]} == {"model"}


def test_an_acknowledged_event_is_there_after_a_kill_and_a_restart(service: Service) -> None:
    service.post("/events", {"event_id": "x", "user": "a/b c🙂", "item": "film-1"})
    service.kill()
    service.start()
    history = service.client.get("/users/a%2Fb%20c%F0%9F%99%82/events").json()["items"]
    assert [event["event_id"] for event in history] == ["x"]
    assert service.terminate() == 0


def test_keys_are_required_beyond_loopback(tmp_path: Path) -> None:
    with Service(tmp_path, NCR_ADMIN_KEY="a-key-of-sixteen-or-more") as service:
        assert service.client.get("/recommend/u").status_code == 401
        assert service.client.get("/docs").status_code == 401
        key = {"X-API-Key": "a-key-of-sixteen-or-more"}
        assert service.client.get("/recommend/u", headers=key).status_code == 200
        assert "a-key-of" not in service.log_text()
    refused = ncr("serve", "--host", "0.0.0.0", "--port", service.port, data_dir=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.strip().count("\n") == 0
    assert "NCR_ADMIN_KEY" in refused.stderr
