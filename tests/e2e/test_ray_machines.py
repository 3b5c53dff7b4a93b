"""A training by Ray over two machines, which are two network namespaces of this one."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch.distributed as dist

from benchmarks.faults.setup import LEASE, WAIT_SECONDS, add_events, storage, submit, wait_for
from ncr_core.optional_imports import is_installed
from tests.cluster.process import children_of, environment_with, wait_until
from tests.cluster.servers import NcrServer, ncr_command

PORT = 6390
ADDRESSES = ("10.83.0.1", "10.83.0.2")
TRAINING: dict[str, Any] = {"recipe": "history", "factors": 8, "epochs": 3, "force": True}
# Epochs of small batches last for seconds, so that the test can kill the worker in them.
LONGER: dict[str, Any] = {"model": "dncr", "epochs": 6, "batch_size": 8, "force": True}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _makes_namespaces() -> bool:
    name = f"ncr-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed"),
    pytest.mark.skipif(
        is_installed("ray") and not _makes_namespaces(),
        reason="this user cannot make network namespaces",
    ),
]


@contextmanager
def machines() -> Iterator[list[str]]:
    """Two network namespaces, with a cable between them and no other network."""
    names = [f"ncr-{secrets.token_hex(3)}" for _ in ADDRESSES]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip(
            *("link", "add", "eth0", "netns", names[0], "type", "veth"),
            *("peer", "name", "eth0", "netns", names[1]),
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names


@contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[int]:
    """A process group, which is killed at the end."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        for pid in [*_below(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def _below(pid: int) -> list[int]:
    children = children_of(pid)
    return [each for child in children for each in [*_below(child), child]]


def _machines_of_ranks(pids: list[int]) -> set[str]:
    """The network namespaces of the ranks below these processes."""
    found = set()
    for pid in (each for first in pids for each in _below(first)):
        with suppress(OSError):
            if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    return found


def test_two_machines_train_a_model_and_train_it_again_after_a_killed_worker() -> None:
    with ExitStack() as stack:
        place = stack.enter_context(storage("sqlite"))
        names = stack.enter_context(machines())
        token = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        env = place.env(**LEASE | {"NCR_JOB_LEASE_SECONDS": "10"} | token)
        env |= {
            "NCR_TRAIN_ENGINE": "ray",
            "NCR_RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}",
            "NCR_TRAIN_FOLDER": str(place.folder / "ranks"),
        }
        pids = []
        for name, address in zip(names, ADDRESSES, strict=True):
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
            # With GPUs that a torch for CPUs cannot use, as where the image is that for CPUs.
            ray += ["--num-gpus=0" if dist.is_nccl_available() else "--num-gpus=1"]
            ray += [f"--node-ip-address={address}"]
            if address == ADDRESSES[0]:
                ray += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            else:
                ray += [f"--address={ADDRESSES[0]}:{PORT}"]
            command = ["ip", "netns", "exec", name, *ray]
            log = place.folder / f"{address}.log"
            pids.append(stack.enter_context(running(command, environment_with(env), log)))
            wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 60, "Ray's start")
        worker = ["ip", "netns", "exec", names[0], *ncr_command("worker")]
        log = place.folder / "worker.log"
        worker_pid = stack.enter_context(running(worker, environment_with(env), log))
        server = stack.enter_context(NcrServer(env, place.folder / "server.log"))
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        add_events(server.url)
        job_id = submit(client, **TRAINING)
        of_ranks: set[str] = set()

        def ended(job: dict[str, Any]) -> bool:
            of_ranks.update(_machines_of_ranks(pids))
            return job["status"] in ("succeeded", "failed")

        job = wait_for(client, job_id, ended)
        assert job["status"] == "succeeded", job["error"]
        assert len(of_ranks) == 2
        version = job["model_version"]

        def is_served() -> bool:
            answer = client.get("/recommend/u1").raise_for_status().json()
            return bool(answer["model_version"] == version)

        wait_until(is_served, WAIT_SECONDS, "the model is served")

        job_id = submit(client, **LONGER)
        wait_for(client, job_id, lambda job: bool(job["progress"] and job["progress"]["epoch"] > 1))
        assert len(_machines_of_ranks(pids)) == 2
        os.kill(worker_pid, 9)
        wait_until(lambda: not _machines_of_ranks(pids), 20, "end of the ranks")
        log = place.folder / "second.log"
        stack.enter_context(running(worker, environment_with(env), log))
        job = wait_for(client, job_id, lambda job: job["status"] == "succeeded")
        assert job["attempt"] == 2
        models = client.get("/admin/models").raise_for_status().json()["items"]
        assert len([model for model in models if model["status"] == "published"]) == 2
