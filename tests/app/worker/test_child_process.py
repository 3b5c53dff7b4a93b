"""A job's child process: its task, its isolation, and a database or disk that is away."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import OperationalError

from app.core.settings import Settings, load_settings
from app.events.training_snapshot import PREFIX, TrainingSnapshot
from app.jobs.schemas import (
    TASK,
    PrecomputeTask,
    TaskSettings,
    TrainingTask,
    TrainOrder,
)
from app.registry.schemas import ModelRow
from app.registry.service import ModelRegistry
from app.training.reader import Retry
from app.wiring import Services
from app.worker.child_process import (
    EXIT_LEASE_OVER,
    SPINS,
    _failure,
    child_environment,
    clock,
    run_task,
)
from ncr_core import atomic_files
from ncr_core.data import array_storage
from ncr_core.data.array_storage import FileStorage
from ncr_core.errors import CheckpointError, CheckpointReadError, ConfigError, TrainingError
from tests.app.conftest import QUICK, add_small_data, publish_model, run_job
from tests.conftest import ON_SQLITE

SECRET = "a-pass-word"
VERSION = "20261122-000000-00aa"


def task_for(settings: Settings, kind: str = "train") -> TrainingTask | PrecomputeTask:
    common: dict[str, Any] = {
        "version": VERSION,
        "device": "cpu",
        "exit_at": clock() + 3600,
        "retry_seconds": 0,
        "settings": TaskSettings.from_settings(settings),
    }
    if kind == "candidates":
        return PrecomputeTask(**common)
    return TrainingTask(params=TrainOrder.model_validate(QUICK), gate_margin=0.05, **common)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "candidates"])
def test_a_database_that_stays_away_is_one_clear_line_without_the_password(
    tmp_path: Path, kind: str
) -> None:
    url = f"postgresql://account:{SECRET}@127.0.0.1:9/ncr"
    task = task_for(Settings(data_dir=tmp_path, database_url=url), kind)
    assert SECRET not in repr(task)
    read, write = os.pipe()  # stays open, as that of a worker that lives
    os.write(write, task.model_dump_json().encode() + b"\n")
    with os.fdopen(read, "rb") as pipe:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "app.worker.child_process"],
            stdin=pipe,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=child_environment(os.environ),
        )
    os.close(write)
    answers = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0
    assert answers[-1] == {
        "failed": "the database was unavailable or refused the query (OperationalError): "
        "the job could not read its data"
    }
    assert "Traceback" not in child.stderr
    assert SECRET not in child.stdout + child.stderr


def start_child(task: BaseModel) -> subprocess.Popen[bytes]:
    """A child process with this task, whose worker lives."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "app.worker.child_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=child_environment(os.environ),
        bufsize=0,
    )
    assert child.stdin is not None
    child.stdin.write(task.model_dump_json().encode() + b"\n")
    return child


def waiting_task(tmp_path: Path, seconds: float) -> BaseModel:
    """A task that waits for a database for ever, and whose lease is soon over."""
    url = "postgresql://account@127.0.0.1:9/ncr"
    task = task_for(Settings(data_dir=tmp_path, database_url=url))
    return task.model_copy(update={"exit_at": clock() + seconds, "retry_seconds": 3600.0})


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-5.0, 3.0])
def test_a_child_exits_before_its_lease_is_over_although_its_worker_lives(
    tmp_path: Path, seconds: float
) -> None:
    """The moment is the task's: a child that starts late has no longer for that."""
    child = start_child(waiting_task(tmp_path, max(0.0, clock() + seconds) - clock()))
    assert child.wait(60) == EXIT_LEASE_OVER


@pytest.mark.slow
def test_a_child_goes_on_while_its_lease_is_renewed_and_exits_with_its_worker(
    tmp_path: Path,
) -> None:
    task = waiting_task(tmp_path, 2.0)
    child = start_child(task)
    assert child.stdin is not None
    # In pieces, and more than one at a time: the last whole line counts.
    later = f"{clock() + 1}\n{clock() + 3600}\n{clock()}".encode()
    for piece in (later[:3], later[3:]):
        child.stdin.write(piece)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(4)
    child.stdin.close()
    assert child.wait(60) == 1


KEPT_INTERPRETER = """
import ctypes, threading
from app.worker.child_process import _watchdog, clock
threading.Thread(target=_watchdog, args=(clock() + 0.5,), daemon=True).start()
print("begun", flush=True)
ctypes.PyDLL(None).usleep(1_200_000)  # as some calls of SciPy: no other thread runs meanwhile
threading.Event().wait(1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("renewed", "code"), [(60.0, 0), (-0.1, EXIT_LEASE_OVER)])
def test_renewals_count_that_came_while_a_call_kept_the_interpreter(
    renewed: float, code: int
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KEPT_INTERPRETER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    time.sleep(0.8)
    child.stdin.write(f"{clock() + renewed}\n")
    child.stdin.flush()
    assert child.wait(timeout=30) == code
    child.stdin.close()


@pytest.mark.anyio
@pytest.mark.slow
@ON_SQLITE
async def test_modules_in_the_working_directory_do_not_shadow_those_of_the_child(
    services: Services, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working directory"
    (folder / "app" / "worker").mkdir(parents=True)
    (folder / "ncr_core").mkdir()
    for name in (
        "app.py", "torch.py", "numpy.py", "json.py", "grp.py", "signal.py",
        "app/__init__.py", "app/worker/__init__.py", "app/worker/child_process.py",
        "ncr_core/__init__.py",
    ):  # fmt: skip
        (folder / name).write_text("raise SystemExit('a module of the working directory')\n")
    monkeypatch.chdir(folder)
    absolute = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", absolute, "app"]))
    await add_small_data(services)
    job = await run_job(services, settings, force=True)
    assert (job.status, job.error) == ("succeeded", None)


def test_only_absolute_entries_of_pythonpath_reach_the_child() -> None:
    environment = {"HOME": "/home/ncr", "PYTHONPATH": ":.:/opt/extra:lib:/opt/extra:"}
    child = child_environment(environment)
    assert child["HOME"] == "/home/ncr"
    path = child["PYTHONPATH"].split(os.pathsep)
    assert path[-1] == "/opt/extra"
    assert path.count("/opt/extra") == 1
    assert all(Path(entry).is_absolute() for entry in path)


def test_the_threads_of_a_child_wait_briefly_unless_the_operator_says_otherwise() -> None:
    assert child_environment({})["GOMP_SPINCOUNT"] == SPINS
    assert child_environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in child_environment({"OMP_WAIT_POLICY": "ACTIVE"})


@pytest.mark.slow
def test_the_watchdog_starts_before_anything_that_takes_long_to_import() -> None:
    """A worker that is suspended meanwhile loses its lease: its child has to be gone by then."""
    script = "import sys, app.worker.child_process; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(os.environ),
    )
    slow = {"torch", "numpy", "fastapi", "pydantic", "sqlalchemy", "safetensors", "structlog"}
    assert not slow & set(done.stdout.split())


def failing_at_first(failures: list[Exception]) -> Callable[..., None]:
    """A hook that raises these errors, one a call, and then does nothing."""

    def hook(*_: Any) -> None:
        if failures:
            raise failures.pop()

    return hook


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        OperationalError("SELECT", None, Exception("gone")),
        sqlite3.OperationalError("database is locked"),
        psycopg.OperationalError("the connection is closed"),
    ],
)
async def test_a_short_outage_of_the_database_does_not_end_a_training(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await add_small_data(services)
    incumbent = await publish_model(services)
    fail_to_read, fail_to_load = failing_at_first([error] * 2), failing_at_first([error] * 2)
    serving = ModelRegistry.serving

    fill = TrainingSnapshot.fill

    def flaky_fill(self: TrainingSnapshot, *arguments: Any) -> None:
        fill(self, *arguments)
        fail_to_read()  # with all rows on the disk

    async def flaky_serving(self: ModelRegistry) -> ModelRow | None:
        fail_to_load()
        return await serving(self)

    monkeypatch.setattr(TrainingSnapshot, "fill", flaky_fill)
    # As large data have.
    monkeypatch.setattr("app.events.training_snapshot.suitable_parts", lambda *_, **__: 5)
    monkeypatch.setattr(ModelRegistry, "serving", flaky_serving)
    pauses: list[float] = []
    summary = await asyncio.to_thread(
        run_task, task_for(settings), lambda progress: None, Retry(30.0, sleep=pauses.append)
    )
    assert summary["metrics"]["gate"]["incumbent"] == incumbent
    assert len(pauses) == 4
    assert list(settings.trainings_folder.iterdir()) == []


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "candidates"])
@ON_SQLITE
async def test_a_full_disk_is_waited_for_and_then_one_clear_line(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    await add_small_data(services)
    version = await publish_model(services)
    await services.models.claim_store()
    settings = settings.model_copy(update={"precompute_users": 60})
    task = task_for(settings, kind)
    if kind == "candidates":
        task = task.model_copy(update={"version": version})
    failures = [full_disk()] * 3
    fail = failing_at_first(failures)
    sync = atomic_files.sync

    def sync_or_fail(path: Path) -> None:  # of what has been written, as a disk tells at last
        fail()
        sync(path)

    monkeypatch.setattr(atomic_files, "sync", sync_or_fail)
    pauses: list[float] = []

    def run(retry: Retry) -> dict[str, Any]:
        return run_task(task, lambda progress: None, retry)

    assert await asyncio.to_thread(run, Retry(30.0, sleep=pauses.append))
    assert len(pauses) == 3
    failures += [full_disk()] * 9
    again = task.model_copy(update={"version": services.models.new_version()})
    task = again if kind == "train" else task
    with pytest.raises(
        CheckpointError, match=r"models cannot be written: No space left on device$"
    ):
        await asyncio.to_thread(run, Retry(0.0))


@pytest.mark.anyio
@ON_SQLITE
async def test_a_disk_that_fills_while_events_are_read_ends_a_training(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)

    def fail(*arguments: Any) -> None:
        raise full_disk()

    monkeypatch.setattr(TrainingSnapshot, "resolve", fail)
    reason = (
        r"^the files of the training in \S+trainings cannot be written or read: No space left on"
    )
    with pytest.raises(TrainingError, match=reason):
        await asyncio.to_thread(run_task, task_for(settings), lambda progress: None, Retry(0.0))
    assert list(settings.trainings_folder.iterdir()) == []


def test_the_signal_of_a_mapped_file_without_room_names_the_disk() -> None:
    assert str(_failure(-signal.SIGBUS)) == (
        "SIGBUS ended the job's process: the disk of its files may be full"
    )
    assert str(_failure(-signal.SIGSEGV)) == "SIGSEGV ended the job's process"


@pytest.mark.anyio
@ON_SQLITE
async def test_what_killed_trainings_left_makes_room_for_the_next(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    monkeypatch.setattr("app.events.snapshot_query._statement", lambda *_: 1 / 0)
    left = settings.trainings_folder / f"{PREFIX}left"
    left.mkdir(parents=True)
    (left / ".owner").write_text("a machine before its restart")
    os.utime(left / ".owner", (0, 0))
    os.utime(left, (0, 0))
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda _: SimpleNamespace(total=2**40, free=9 if left.exists() else 2**40),
    )
    run = asyncio.to_thread(run_task, task_for(settings), lambda progress: None, Retry(0.0))
    with pytest.raises(ZeroDivisionError):
        await run
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**40, free=9))
    needs = r"^this training needs about 0\.0 GiB of disk in \S+trainings for \d+ events"
    with pytest.raises(TrainingError, match=needs):
        await asyncio.to_thread(run_task, task_for(settings), lambda progress: None, Retry(0.0))
    assert list(settings.trainings_folder.iterdir()) == []


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("tables", ["replicated", "sharded"])
@ON_SQLITE
async def test_sharded_tables_are_files_for_the_process_of_the_job(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch, tables: str
) -> None:
    await add_small_data(services)
    settings = settings.model_copy(update={"train_engine": "torchrun", "train_tables": tables})
    monkeypatch.setattr(array_storage, "MIN_BYTES", 0)
    made: list[tuple[int, ...]] = []
    zeros = FileStorage.zeros

    def counted(self: FileStorage, shape: Any, dtype: Any) -> Any:
        made.append(tuple(shape) if isinstance(shape, tuple) else (shape,))
        return zeros(self, shape, dtype)

    monkeypatch.setattr(FileStorage, "zeros", counted)
    task = task_for(settings)
    summary = await asyncio.to_thread(run_task, task, lambda progress: None, Retry(0.0))
    assert summary["metrics"]["full"]["users"] > 0
    table = (summary["items"], QUICK["factors"])
    assert made  # the events, at least
    # The model, what was evaluated, and tables in float64 and float32 for each ranking.
    assert made.count(table) >= 6 if tables == "sharded" else table not in made
    assert list(settings.trainings_folder.iterdir()) == []


@pytest.mark.anyio
@ON_SQLITE
async def test_a_model_that_cannot_be_sharded_is_refused_before_its_parts_are_trained(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    sharded = {"train_engine": "torchrun", "train_tables": "sharded"}
    task = task_for(settings.model_copy(update=sharded))
    task = task.model_copy(update={"params": TrainOrder.model_validate({"model": "neupr"})})
    monkeypatch.setattr("ncr_core.training.pretraining.start_model", lambda *_: 1 / 0)
    refused = "^tables sharded by rows are for nbpr and dncr, not neupr: set NCR_TRAIN_TABLES "
    with pytest.raises(ConfigError, match=refused):
        await asyncio.to_thread(run_task, task, lambda progress: None, Retry(0.0))


@pytest.mark.anyio
@ON_SQLITE
async def test_a_store_that_cannot_be_written_ends_a_training_before_it_begins(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    (settings.data_dir / "models").write_text("a file in place of the folder")
    monkeypatch.setattr("app.events.training_snapshot.take_snapshot", lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match=r"models cannot be written: "):
        await asyncio.to_thread(run_task, task_for(settings), lambda progress: None, Retry(0.0))


@pytest.mark.anyio
@ON_SQLITE
async def test_a_training_that_does_not_fit_says_what_it_needs_before_it_reads_the_events(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    monkeypatch.setattr("app.events.snapshot_query._statement", lambda *_: 1 / 0)
    small = task_for(settings.model_copy(update={"train_memory_bytes": 128 * 2**20}))
    needs = (
        r"^this training needs about 1\.\d GiB of memory \([\d,]+ events, [\d,]+ users, [\d,]+ "
        r"items\) and 0\.1 GiB are allowed by NCR_TRAIN_MEMORY_BYTES: "
    )
    with pytest.raises(TrainingError, match=needs):
        await asyncio.to_thread(run_task, small, lambda progress: None, Retry(0.0))


@pytest.mark.anyio
@ON_SQLITE
async def test_a_child_that_cannot_be_started_is_one_clear_line(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    job = await run_job(services, settings)
    assert job.status == "failed"
    assert job.error == "the job's process could not be started: Resource temporarily unavailable"


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_disk_that_fails_once_does_not_count_as_an_unreadable_incumbent(
    services: Services, settings: Settings
) -> None:
    """Such a model would be replaced by whatever was trained, without a comparison."""
    await add_small_data(services)
    incumbent = await publish_model(services)
    file = services.models.folder(incumbent) / "model.safetensors"
    aside = file.rename(settings.data_dir / "aside")
    file.mkdir()  # reading it is an error of the system, and not that the file is not there
    task = task_for(settings)

    def train(retry: Retry) -> dict[str, Any]:
        return run_task(task, lambda progress: None, retry)

    with pytest.raises(CheckpointReadError, match=r"model\.safetensors .*cannot be read"):
        await asyncio.to_thread(train, Retry(0.0))

    def repair(seconds: float) -> None:
        file.rmdir()
        aside.rename(file)

    gate = (await asyncio.to_thread(train, Retry(30.0, sleep=repair)))["metrics"]["gate"]
    assert gate["incumbent"] == incumbent
    assert gate["finding"] != "incumbent_unreadable"


def tasks(settings: Settings) -> list[TrainingTask | PrecomputeTask]:
    common: dict[str, Any] = {
        "version": "20261122-000000-00aa",
        "device": "cpu",
        "exit_at": 24.5,
        "retry_seconds": 300.0,
        "settings": TaskSettings.from_settings(settings),
    }
    params = TrainOrder.model_validate({"model": "nbpr", "learning_rate": 0.005})
    seconds = {"train": 10.5}
    training = TrainingTask(params=params, gate_margin=0.05, expected_seconds=seconds, **common)
    return [training, PrecomputeTask(**common)]


def test_a_task_is_the_same_on_both_sides_of_the_pipe(tmp_path: Path) -> None:
    for task in tasks(load_settings(data_dir=tmp_path)):
        assert TASK.validate_json(task.model_dump_json()) == task


def test_the_child_has_the_settings_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(
        data_dir=Path("var"), candidates=300, feedback='{"view": "seen"}', feedback_half_life_days=9
    )
    task = TASK.validate_json(tasks(settings)[0].model_dump_json())
    child = load_settings(**task.settings.model_dump())
    assert child.data_dir == tmp_path / "var"
    assert child.effective_database_url == settings.effective_database_url
    for name in ("candidates", "feedback", "feedback_half_life_days", "checkpoint_store"):
        assert getattr(child, name) == getattr(settings, name)


@pytest.mark.parametrize(
    "change", [{"kind": "sweep"}, {"exit_at": -1}, {"params": {"epochs": -1}}, {"more": 1}]
)
def test_an_invalid_task_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    task = json.loads(tasks(load_settings(data_dir=tmp_path))[0].model_dump_json())
    with pytest.raises(ValidationError):
        TASK.validate_json(json.dumps(task | change))
