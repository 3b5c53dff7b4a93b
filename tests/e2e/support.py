"""A whole service in processes of its own, and commands as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.process import wait_until
from tests.cluster.servers import ForkedCommand, NcrServer

COMMAND_SECONDS = 120.0
TRAINING = {"model": "neupr", "factors": 4, "epochs": 3}


def ncr(
    *arguments: object, data_dir: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own and captures what it prints."""
    command = [str(argument) for argument in arguments]
    env = {**os.environ, "NCR_DATA_DIR": str(data_dir or "/nowhere"), **env}
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        # Servers and workers are started as users start them; test_wheel runs installed commands.
        process = ForkedCommand(command, env, out.name, err.name)
        try:
            code = process.wait(COMMAND_SECONDS)
        finally:
            process.send_signal(signal.SIGKILL)
        printed = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess(["ncr", *command], code, *printed)


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
