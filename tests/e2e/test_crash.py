"""A worker that is killed: its training ends with it, and another worker takes the job up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from app.core.settings import Settings, load_settings
from app.jobs.schemas import JobRow, TrainParams
from app.services import build_services
from tests.app.models import QUICK, add_small_data
from tests.conftest import ON_SQLITE

pytestmark = pytest.mark.e2e

NCR = [sys.executable, "-c", "from app.cli import main; main()"]


def with_services(settings: Settings, work: Callable[[Any], Any]) -> Any:
    async def run() -> Any:
        services = await build_services(settings)
        try:
            return await work(services)
        finally:
            await services.close()

    return anyio.run(run)


def start_worker(database_url: str, data_dir: Path) -> subprocess.Popen[bytes]:
    env = {
        "NCR_DATABASE_URL": database_url,
        "NCR_DATA_DIR": str(data_dir),
        "NCR_JOB_LEASE_SECONDS": "2",
        "NCR_JOB_POLL_SECONDS": "0.2",
    }
    return subprocess.Popen([*NCR, "worker"], env={**os.environ, **env})


def wait_for(settings: Settings, job_id: str, done: Callable[[JobRow], bool]) -> JobRow:
    async def job(services: Any) -> JobRow:
        row: JobRow = await services.jobs.get(job_id)
        return row

    deadline = time.monotonic() + 90
    while not done(row := with_services(settings, job)):
        assert time.monotonic() < deadline, row
        time.sleep(0.2)
    return row


# On PostgreSQL: in test_topology.
@ON_SQLITE
def test_a_killed_worker(database_url: str, tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, database_url=database_url)

    async def prepare(services: Any) -> str:
        await add_small_data(services)
        params = TrainParams.model_validate(QUICK | {"epochs": 1000, "model": "dncr"})
        job_id: str = await services.jobs.submit_training(params)
        return job_id

    job_id = with_services(settings, prepare)
    first = start_worker(database_url, tmp_path)
    second = None
    try:
        wait_for(settings, job_id, lambda row: bool(row.progress and row.progress["epoch"]))
        children = training_processes(first.pid)
        assert len(children) == 1
        first.send_signal(signal.SIGKILL)
        first.wait()
        deadline = time.monotonic() + 10
        while is_running(children[0]):
            assert time.monotonic() < deadline, "the training outlived its worker"
            time.sleep(0.1)

        second = start_worker(database_url, tmp_path)
        row = wait_for(settings, job_id, lambda row: row.attempt == 2 and bool(row.progress))
        assert row.status == "running"
        with_services(settings, lambda services: services.jobs.cancel(job_id))
        assert wait_for(settings, job_id, lambda row: row.status == "cancelled").attempt == 2
        second.send_signal(signal.SIGTERM)
        assert second.wait(20) == 0
        assert not list(tmp_path.glob("models/*"))
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


def training_processes(parent: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and "app.jobs.child" in command:
            found.append(int(process.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
