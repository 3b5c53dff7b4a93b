"""A whole service in processes of its own, and commands as a user runs them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.cli import main
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer

# Commands are forked from a process that has imported what they import, which takes seconds.
# Servers and workers are started as users start them; test_wheel runs the installed commands.
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    ["tests.e2e.support", "app.cli.main", "app.main", "app.transfer", "app.worker", "ncr_core"]
)
COMMAND_SECONDS = 120.0
TRAINING = {"model": "neupr", "factors": 4, "epochs": 3}


def ncr(
    *arguments: object, data_dir: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own and captures what it prints."""
    command = [str(argument) for argument in arguments]
    env = {**os.environ, "NCR_DATA_DIR": str(data_dir or "/nowhere"), **env}
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        process = _FORK.Process(target=_run, args=(command, env, out.name, err.name))
        process.start()
        try:
            process.join(COMMAND_SECONDS)
            assert process.exitcode is not None, f"ncr {command} did not end: {err.read()!r}"
        finally:
            process.kill()
        printed = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess(["ncr", *command], process.exitcode, *printed)


def _run(command: list[str], env: dict[str, str], out: str, err: str) -> None:
    """Become `ncr` in a process that was forked."""
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["ncr", *command]
    main()


class Service(NcrServer):
    """`ncr serve --with-worker` and a client of it; use it in a ``with`` statement."""

    def __init__(self, data_dir: Path, **env: str) -> None:
        env = {"NCR_DATA_DIR": str(data_dir), **env}
        super().__init__(env, data_dir / "server.log", with_worker=True)
        self.client = httpx2.Client(base_url=self.url, timeout=30)

    def close(self) -> None:
        self.client.close()
        super().close()

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
        """The ended job; the progress on the way is in `phases`."""
        response = self.client.post("/admin/train", json=TRAINING)
        assert response.status_code == 202
        phases: set[str] = set()
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            job: dict[str, Any] = self.client.get(f"/admin/jobs/{response.json()['job_id']}").json()
            if job["progress"]:
                phases.add(job["progress"]["phase"])
            if job["status"] not in ("queued", "running"):
                return job | {"phases": phases}
            time.sleep(0.05)
        pytest.fail(f"the job did not end: {job}")

    def wait_for(self, version: str) -> None:
        """Waits until the server serves this version."""
        wait_until(
            lambda: self.recommend("user-1")["model_version"] == version, 20, self.log_text()
        )
