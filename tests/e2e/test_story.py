"""The whole story over real HTTP, against a real `ncr serve --with-worker`."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.app.models import SMALL

pytestmark = pytest.mark.e2e

NCR = [sys.executable, "-c", "from app.cli import main; main()"]
TRAINING = {"model": "neupr", "factors": 4, "epochs": 3}


class Server:
    """A server process and a client of it."""

    def __init__(self, data_dir: Path, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = data_dir / "server.log"
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*NCR, "serve", "--with-worker", "--port", str(self.port)],
                env={**os.environ, "NCR_DATA_DIR": str(data_dir), **env},
                stderr=log,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.client.get("/health/ready").status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        pytest.fail(f"the server did not get ready: {self.log.read_text()[-2000:]}")

    def recommend(self, user: str, **params: Any) -> dict[str, Any]:
        response = self.client.get(f"/recommend/{user}", params=params)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, path: str, body: Any) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code < 300, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def train(self) -> dict[str, Any]:
        """Trains and waits for the end; every progress that was seen is in `seen`."""
        response = self.client.post("/admin/train", json=TRAINING)
        assert response.status_code == 202
        path = f"/admin/jobs/{response.json()['job_id']}"
        seen: list[tuple[str, int]] = []
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            job: dict[str, Any] = self.client.get(path).json()
            progress = job["progress"]
            if progress and (progress["phase"], progress["epoch"]) not in seen:
                seen.append((progress["phase"], progress["epoch"]))
            if job["status"] not in ("queued", "running"):
                return job | {"seen": seen}
            time.sleep(0.05)
        pytest.fail(f"the job did not end: {job}")

    def wait_for(self, version: str) -> None:
        """Until the server serves this version."""
        deadline = time.monotonic() + 20
        while self.recommend("user-1")["model_version"] != version:
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


class Loop:
    """Requests all the time, in the background; what went wrong is in `failures`."""

    def __init__(self, server: Server) -> None:
        self._server = server
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
        with httpx2.Client(base_url=f"http://127.0.0.1:{self._server.port}", timeout=30) as client:
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
        done = subprocess.run(
            [*NCR, "import", str(source)],
            env={**os.environ, "NCR_DATA_DIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    return folder


@pytest.fixture
def data_dir(imported: Path, tmp_path: Path) -> Path:
    """A test's own copy of it."""
    return Path(shutil.copytree(imported, tmp_path / "var"))


@pytest.fixture
def server(data_dir: Path) -> Iterator[Server]:
    server = Server(data_dir)
    yield server
    server.client.close()
    server.process.kill()
    server.process.wait()


def test_the_story(server: Server) -> None:
    # Before any model: the popular, with titles.
    first = server.recommend("user-1")
    assert {item["source"] for item in first["items"]} == {"popular"}
    assert all(item["title"].startswith("The ") for item in first["items"])

    job = server.train()
    assert job["status"] == "succeeded", job
    server.wait_for(job["model_version"])
    personal = server.recommend("user-1")
    assert {item["source"] for item in personal["items"]} == {"model"}

    # Twenty events: none of those items comes again, and posting them again adds nothing.
    taken = [item["id"] for item in server.recommend("user-1", n=20)["items"]]
    events = [{"event_id": f"e{n}", "user": "user-1", "item": i} for n, i in enumerate(taken)]
    verdict = server.post("/events", events)
    assert (verdict["accepted"], verdict["duplicates"], verdict["rejected"]) == (20, 0, [])
    following = server.recommend("user-1", min_seq=verdict["last_seq"])
    assert following["as_of_seq"] >= verdict["last_seq"]
    assert not {item["id"] for item in following["items"]} & set(taken)
    again = server.post("/events", events)
    assert (again["accepted"], again["duplicates"]) == (0, 20)
    assert again["last_seq"] == verdict["last_seq"]

    # Retraining while requests run without a pause: all are answered, by one model or the other.
    with Loop(server) as loop:
        second = server.train()
        assert second["status"] == "succeeded", second
        server.wait_for(second["model_version"])
        time.sleep(0.3)
    assert loop.failures == []
    assert loop.answered > 20
    assert loop.versions == {job["model_version"], second["model_version"]}
    assert len({phase for phase, _ in second["seen"]}) > 1  # its progress moved
    model = server.client.get(f"/admin/models/{second['model_version']}").json()
    assert model["active"] is True
    assert model["trained_seq"] == verdict["last_seq"]
    assert {i["source"] for i in server.recommend("user-1")["items"]} == {"model"}

    # Told to stop, it ends in order; started again, it knows everything.
    assert server.stop() == 0


def test_what_was_acknowledged_is_there_after_a_restart(data_dir: Path) -> None:
    server = Server(data_dir)
    server.post("/events", {"event_id": "x", "user": "a/b c🙂", "item": "film-1"})
    server.process.kill()
    server.process.wait()
    server.client.close()
    server = Server(data_dir)
    try:
        history = server.client.get("/users/a%2Fb%20c%F0%9F%99%82/events").json()["items"]
        assert [event["event_id"] for event in history] == ["x"]
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.client.close()


def test_the_door(data_dir: Path) -> None:
    server = Server(data_dir, NCR_ADMIN_KEY="a-key-of-sixteen-or-more")
    try:
        assert server.client.get("/recommend/u").status_code == 401
        assert server.client.get("/docs").status_code == 401
        key = {"X-API-Key": "a-key-of-sixteen-or-more"}
        assert server.client.get("/recommend/u", headers=key).status_code == 200
        assert "a-key-of" not in server.log.read_text()
    finally:
        server.stop()
        server.client.close()
    refused = subprocess.run(
        [*NCR, "serve", "--host", "0.0.0.0", "--port", str(server.port)],
        env={**os.environ, "NCR_DATA_DIR": str(data_dir)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode != 0
    assert refused.stderr.strip().count("\n") == 0
    assert "NCR_ADMIN_KEY" in refused.stderr
