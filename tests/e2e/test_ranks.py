"""Trainings by several ranks, in a whole service: ranks and workers are killed in their middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.faults.setup import (
    LEASE,
    USER,
    WAIT_SECONDS,
    Storage,
    add_events,
    storage,
    submit,
    wait_for,
)
from ncr_core.optional_imports import is_installed
from tests.cluster.process import children_of, is_running, wait_until
from tests.cluster.servers import NcrServer, NcrWorker

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Epochs of small batches last for seconds, so that a test can kill ranks in them.
TRAINING: dict[str, Any] = {"model": "dncr", "epochs": 6, "batch_size": 8, "force": True}
ENGINES = [
    "torchrun",
    pytest.param(
        "ray", marks=pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed")
    ),
]


@dataclass(frozen=True)
class Service:
    place: Storage
    env: dict[str, str]
    client: httpx2.Client

    def worker(self, name: str) -> NcrWorker:
        return NcrWorker(self.env, self.place.folder / f"{name}.log")

    def served(self) -> str | None:
        answer = self.client.get(f"/recommend/{USER}").raise_for_status().json()
        version: str | None = answer["model_version"]
        return version

    def passed_gate(self, version: str) -> bool:
        report = self.client.get(f"/admin/models/{version}").raise_for_status().json()
        passed: bool = report["metrics"]["gate"]["passed"]
        return passed

    def published(self) -> list[str]:
        models = self.client.get("/admin/models").json()["items"]
        return [model["version"] for model in models if model["status"] == "published"]


@contextmanager
def service(engine: str, **settings: str) -> Iterator[Service]:
    with storage("sqlite") as place:
        env = place.env(**{**LEASE, "NCR_JOB_LEASE_SECONDS": "10", "NCR_TRAIN_ENGINE": engine})
        env |= settings
        with (
            NcrServer(env, place.folder / "server.log") as server,
            httpx2.Client(base_url=server.url, timeout=30) as client,
        ):
            add_events(server.url)
            yield Service(place, env, client)


def descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [each for child in children for each in descendants(child)]


def ranks_below(worker: NcrWorker, engine: str) -> list[int]:
    """The processes that train: those of torchrun, or Ray's workers that do."""
    word = b"rank_process" if engine == "torchrun" else b"RayTrainWorker"
    ranks = []
    for pid in descendants(worker.pid):
        with suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(pid)
    return ranks


# Ray takes half a minute for its start on a quiet machine.
START_SECONDS = {"torchrun": WAIT_SECONDS, "ray": 3 * WAIT_SECONDS}


def is_agent_of_ray(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False
    return command.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))


def begun(job: dict[str, Any]) -> bool:
    return bool(job["progress"] and job["progress"]["epoch"] >= 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_rank_costs_an_epoch_and_a_lost_worker_an_attempt(engine: str) -> None:
    with service(engine) as its:
        with its.worker("first") as worker:
            job_id = submit(its.client, **TRAINING)
            wait_for(its.client, job_id, begun, START_SECONDS[engine])
            ranks = ranks_below(worker, engine)
            assert len(ranks) == 2
            os.kill(ranks[-1], signal.SIGKILL)
            job = wait_for(its.client, job_id, lambda job: job["status"] == "succeeded")
            assert job["attempt"] == 1
            assert its.published() == [job["model_version"]]
            version = job["model_version"]
            assert its.passed_gate(version)
            wait_until(lambda: its.served() == version, WAIT_SECONDS, "the model is served")

            job_id = submit(its.client, **TRAINING)
            wait_for(its.client, job_id, begun, START_SECONDS[engine])
            below = descendants(worker.pid)
            assert len(ranks_below(worker, engine)) == 2
            agents = {pid for pid in below if is_agent_of_ray(pid)}
            ranks = [pid for pid in below if pid not in agents]
            worker.kill()
            wait_until(lambda: not any(map(is_running, ranks)), 20, "end of the ranks")
        with its.worker("second") as worker:
            job = wait_for(its.client, job_id, lambda job: job["status"] == "succeeded")
            assert job["attempt"] == 2
            assert len(its.published()) == 2
            assert worker.terminate() == 0
        # Agents of Ray look for its head for a minute before they end.
        wait_until(lambda: not any(map(is_running, agents)), WAIT_SECONDS, "end of agents")


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that serves a model, and whose workers the tests start."""
    with service("torchrun") as its:
        log = tmp_path_factory.mktemp("idle") / "worker.log"
        with NcrWorker(its.env | {"NCR_TRAIN_ENGINE": "local"}, log):
            job_id = submit(its.client, model="nbpr", epochs=2, force=True)
            job = wait_for(its.client, job_id, lambda job: job["status"] == "succeeded")
        version = job["model_version"]
        wait_until(lambda: its.served() == version, WAIT_SECONDS, "the model is served")
        yield its


def test_a_cancelled_training_leaves_no_rank(idle: Service) -> None:
    before = idle.published()
    with idle.worker("cancelled") as worker:
        job_id = submit(idle.client, **TRAINING)
        wait_for(idle.client, job_id, begun, START_SECONDS["torchrun"])
        ranks = ranks_below(worker, "torchrun")
        assert len(ranks) == 2
        idle.client.post(f"/admin/jobs/{job_id}/cancel").raise_for_status()
        wait_for(idle.client, job_id, lambda job: job["status"] == "cancelled")
        wait_until(lambda: not any(map(is_running, ranks)), 20, "end of the ranks")
    assert idle.published() == before


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"NCR_TRAIN_RANKS": "61"}, "set NCR_TRAIN_RANKS to 60 or less"),
        ({"NCR_TRAIN_ENGINE": "ray", "NCR_RAY_ADDRESS": "10.9.8.7:6379"}, "RAY_AUTH_MODE=token"),
        ({"NCR_TRAIN_ENGINE": "ray"}, "neural-collaborative-ranking[ray]"),
        ({"NCR_TRAIN_FOLDER": "/proc/absent"}, "files: No such file or directory (/proc/absent)"),
    ],
)
def test_an_engine_that_cannot_train_is_one_sentence(
    settings: dict[str, str], words: str, idle: Service, tmp_path: Path
) -> None:
    if settings == {"NCR_TRAIN_ENGINE": "ray"} and is_installed("ray"):
        (tmp_path / "ray.py").write_text("raise ImportError('as if it were not installed')")
        settings = settings | {"PYTHONPATH": str(tmp_path)}
    env = idle.env | settings | {"NCR_TRAIN_MEMORY_BYTES": str(10**12)}
    job_id = submit(idle.client, model="nbpr", epochs=2, force=True)
    with NcrWorker(env, tmp_path / "worker.log"):
        job = wait_for(idle.client, job_id, lambda job: job["status"] == "failed")
    assert words in job["error"]
    assert "\n" not in job["error"]
    assert idle.published() == [idle.served()]
