"""What the runs with workers have in common: small data, jobs over HTTP, and a watchful eye."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from deploy.processes import NcrServer, NcrWorker, wait_until
from ncr_core.data.synthetic import synthetic_catalogue

SMALL = synthetic_catalogue(60, 50, 12)
USER = SMALL.interactions[0][0]
LEASE = {
    "NCR_JOB_LEASE_SECONDS": "2",
    "NCR_JOB_POLL_SECONDS": "0.2",
    "NCR_MODEL_POLL_SECONDS": "0.2",
    "NCR_PRECOMPUTE_USERS": "0",
}
# By force: with so few users the gate may find any model worse, and this is not about that.
TRAINING: dict[str, Any] = {"model": "nbpr", "factors": 4, "epochs": 40, "force": True}
SECONDS = 120.0  # for anything to happen: the first model of a new checkout compiles its kernels
ENDED = ("succeeded", "failed", "cancelled", "rejected")


def add_events(base: str) -> None:
    """60 users of 50 items."""
    rows = [{"event_id": f"{u} {i}", "user": u, "item": i} for u, i, _ in SMALL.interactions]
    httpx2.post(f"{base}/events", json=rows, timeout=60).raise_for_status()


def submit(client: httpx2.Client, **params: Any) -> str:
    """Asks for a training; its job."""
    answer = client.post("/admin/train", json=TRAINING | params)
    answer.raise_for_status()
    job_id: str = answer.json()["job_id"]
    return job_id


def wait_for(
    client: httpx2.Client,
    job_id: str,
    done: Callable[[dict[str, Any]], bool],
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """The job when ``done`` says so."""
    until = time.monotonic() + seconds
    while True:
        job: dict[str, Any] = client.get(f"/admin/jobs/{job_id}").json()
        if done(job):
            return job
        if time.monotonic() > until:
            raise AssertionError(f"nothing came of {job}")
        time.sleep(0.05)


def has_ended(job: dict[str, Any]) -> bool:
    return job["status"] in ENDED


def train(client: httpx2.Client, *bases: str, **params: Any) -> str:
    """A new version, once all these servers serve it."""
    job = wait_for(client, submit(client, **params), has_ended)
    if job["status"] != "succeeded":
        raise AssertionError(job)
    version: str = job["model_version"]
    for base in bases:
        wait_until(partial(serves, base, version), SECONDS, f"{version} at {base}")
    return version


def serves(base: str, version: str) -> bool:
    """Whether a list of this server is of this version."""
    answer = httpx2.get(f"{base}/recommend/{USER}", timeout=30)
    return answer.status_code == 200 and answer.json()["model_version"] == version


class Watch:
    """Looks all the time which versions are served, and how many trainings run side by side."""

    def __init__(self, base: str, workers: Callable[[], list[NcrWorker]]) -> None:
        self.versions: set[str] = set()
        self.answers = 0
        self.failures: list[str] = []
        self.most_at_once = 0
        """Trainings that ran side by side, by the processes of workers that live."""
        self._base = base
        self._workers = workers
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._ask, self._count)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._base, timeout=30) as client:
            while not self._stop.wait(0.05):
                answer = client.get(f"/recommend/{USER}")
                self.answers += 1
                if answer.status_code != 200 or len(answer.json()["items"]) != 10:
                    self.failures.append(answer.text)
                elif answer.json()["model_version"] is not None:
                    self.versions.add(answer.json()["model_version"])

    def _count(self) -> None:
        while not self._stop.wait(0.05):
            at_once = sum(len(w.training_pids()) for w in self._workers() if w.running)
            self.most_at_once = max(self.most_at_once, at_once)


def check_models(client: httpx2.Client, watch: Watch) -> dict[str, int]:
    """What is wrong with the registry beside what was served: all must be 0."""
    models = client.get("/admin/models?n=1000").json()["items"]
    jobs = {j["job_id"]: j for j in client.get("/admin/jobs?n=1000").json()["items"]}
    of_jobs = [m["job_id"] for m in models]
    known = {m["version"] for m in models}
    unfinished = [
        m
        for m in models
        if jobs[m["job_id"]]["status"] != "succeeded"
        or jobs[m["job_id"]]["model_version"] != m["version"]
    ]
    damaged = [
        m
        for m in models
        if client.post(f"/admin/models/{m['version']}/activate").status_code != 200
    ]
    return {
        "half published": len(unfinished) + len(damaged),
        "served and unknown": len(watch.versions - known),
        "published twice": len(of_jobs) - len(set(of_jobs)),
        "failed answers": len(watch.failures),
    }


def start_pair(env: Mapping[str, str], folder: Path) -> tuple[NcrServer, list[NcrWorker]]:
    """A server and two workers, not started yet."""
    workers = [NcrWorker(env, folder / f"worker-{n}.log") for n in (1, 2)]
    return NcrServer(env, folder / "server.log"), workers
