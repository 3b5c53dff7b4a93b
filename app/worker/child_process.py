"""Both ends of the child process that a job runs in.

The worker calls `run_in_child`, which starts ``python -P -m app.worker.child_process`` and writes a
task, one line of JSON, to its standard input. The pipe then stays open. When the pipe closes, the
worker is dead and the child exits.

The task names a moment before the end of the job's lease. Each renewal sends a later moment in a
line of its own. Whatever keeps the worker from a renewal, the child exits at that moment, because
another worker may start the same job after the lease.

The child answers in lines of JSON on standard output: ``{"progress": …}`` with its peak of memory,
and at the end ``{"done": …}`` or ``{"failed": "why"}``.

Only the worker ends a child. A supervisor or a terminal signals all processes of a service at once.
The child therefore has a session of its own, and ignores SIGTERM and SIGINT. The worker gets the
signals too, gives the job back and kills the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import app

if TYPE_CHECKING:  # the child imports nothing that takes time before its watchdog is on guard
    from app.core.settings import Settings
    from app.jobs.schemas import Task
    from app.training.reader import Retry
    from ncr_core.data.array_storage import ArrayStorage

EXIT_LEASE_OVER = 75  # EX_TEMPFAIL of sysexits.h: try again
MAX_LINE_BYTES = 2**20  # of an answer; the summary is the longest
PROGRESS_SECONDS = 0.2  # between two writes of progress: epochs may take milliseconds
WAKE_SECONDS = 1.0  # between two looks of the watchdog: its timer stands while a machine sleeps
SPINS = "1000"  # rounds of busy waiting; the default of libgomp is 300,000
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Progress = dict[str, Any]
OnProgress = Callable[[Progress], None]
Heartbeat = Callable[[Progress | None], Awaitable[float]]
"""Renews the lease, stores progress, and returns the time by `clock` at which the child exits.

Raises LostJob, Cancelled or Stalled."""


def clock() -> float:
    """Seconds since the start of the machine, the same in all of its processes.

    On Linux the seconds include the time in which the machine was suspended.
    """
    return time.clock_gettime(_CLOCK)


# How a job can end other than by success


class LostJob(Exception):  # noqa: N818 - an outcome, not an error to report
    """Another worker owns the job now. This worker writes nothing more about the job."""


class Cancelled(Exception):  # noqa: N818 - requested by a client
    """A client cancelled the job."""


class Stopped(Exception):  # noqa: N818 - requested by the operator
    """The worker was told to stop."""


class Stalled(Exception):  # noqa: N818 - an outcome
    """The worker could not renew the lease for too long, and its child process gave up."""


class Interrupted(Exception):  # noqa: N818 - an outcome
    """A stop signal ended the child process, which did not ignore the signal yet."""


class TrainingFailed(Exception):  # noqa: N818 - the job failed, not the worker
    """The child process failed; the message is one line for the client."""


# The worker's end


async def run_in_child(
    task: Task,
    heartbeat: Heartbeat,
    heartbeat_seconds: float,
    stop: asyncio.Event,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Runs a task in a child process, which has ended when the call returns or raises.

    Args:
        task: The task.
        heartbeat: Called every ``heartbeat_seconds``, and soon after each progress report.
        heartbeat_seconds: The interval of heartbeats.
        stop: The event that ends the child.
        on_progress: Called with each progress report.

    Returns:
        The child's summary.

    Raises:
        Stopped: ``stop`` was set.
        Stalled: The lease was not renewed for too long.
        Interrupted: A stop signal from elsewhere ended the child in its first moments.
        TrainingFailed: The child failed, died or could not be started.
        LostJob: From ``heartbeat``, which also raises Cancelled and Stalled.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the working directory is not on sys.path
            "-m",
            "app.worker.child_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env=child_environment(os.environ),
            start_new_session=True,
        )
    except OSError as error:  # no memory, or too many processes or files
        reason = error.strerror or str(error)
        raise TrainingFailed(f"the job's process could not be started: {reason}") from None
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    try:
        # Through a pipe: a command line shows to everyone on the machine, and the task may hold
        # the database's password.
        child.stdin.write(task.model_dump_json().encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: its exit code tells why
            await child.stdin.drain()
        return await _follow(child, heartbeat, heartbeat_seconds, stop, on_progress)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: no relative entry of PYTHONPATH may shadow its modules.

    If the worker runs from a checkout instead of installed packages, PYTHONPATH gets the checkout,
    so that the child runs the same code.

    The threads of libgomp look only ``SPINS`` times for each other before they sleep, unless their
    wait policy is set, as `ncr serve` does. Beside another busy process they would otherwise wait
    most of the time for a thread without a core.
    """
    root = str(Path(app.__file__).resolve().parent.parent)
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    path = [] if root in installed else [root]
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    path += [entry for entry in entries if Path(entry).is_absolute()]
    child = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    if "OMP_WAIT_POLICY" not in child:
        child.setdefault("GOMP_SPINCOUNT", SPINS)
    return child | ({"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))} if path else {})


async def _follow(
    child: asyncio.subprocess.Process,
    heartbeat: Heartbeat,
    heartbeat_seconds: float,
    stop: asyncio.Event,
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    """Reads the child's answers and sends heartbeats until its summary comes."""
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    now = asyncio.get_running_loop().time
    unwritten: Progress | None = None
    line = asyncio.ensure_future(child.stdout.readline())
    stopped = asyncio.ensure_future(stop.wait())
    last_heartbeat = now()
    try:
        while True:
            await asyncio.wait(
                {line, stopped},
                timeout=min(heartbeat_seconds, 1.0) if unwritten is None else PROGRESS_SECONDS,
                return_when="FIRST_COMPLETED",
            )
            if stopped.done():
                raise Stopped
            if line.done():
                if not line.result().endswith(b"\n"):  # the process ended, perhaps within a line
                    raise _failure(await child.wait())
                message = json.loads(line.result())
                if "done" in message:
                    summary: dict[str, Any] = message["done"]
                    return summary
                if "failed" in message:
                    raise TrainingFailed(message["failed"])
                unwritten = message["progress"]
                if on_progress is not None:
                    on_progress(message["progress"])
                line = asyncio.ensure_future(child.stdout.readline())
            since = now() - last_heartbeat
            if since >= heartbeat_seconds or (unwritten and since >= PROGRESS_SECONDS):
                last_heartbeat = now()
                exit_at = await heartbeat(unwritten)
                child.stdin.write(f"{exit_at}\n".encode())
                unwritten = None
    finally:
        line.cancel()
        stopped.cancel()


_HINTS: dict[int, str] = {
    signal.SIGKILL: ": the machine may lack memory for it",
    signal.SIGBUS: ": the disk of its files may be full",  # they are mapped into memory
}


def _failure(exit_code: int) -> Exception:
    if exit_code == EXIT_LEASE_OVER:
        return Stalled("the worker did not renew the lease in time")
    if -exit_code in STOP_SIGNALS:
        return Interrupted("a stop signal ended the process of the job")
    if exit_code >= 0:
        return TrainingFailed(f"the job's process ended with exit code {exit_code}")
    hint = _HINTS.get(-exit_code, "")
    return TrainingFailed(f"{_signal_name(-exit_code)} ended the job's process{hint}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# The child's end


def main() -> None:
    """Reads a task from standard input, runs it, and writes the outcome to standard output."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Whatever else prints must not get between the lines of the protocol.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows is the watchdog's to read
        if not (byte := os.read(sys.stdin.fileno(), 1)):
            sys.exit(1)  # the worker is dead
        line += byte
    exit_at = float(json.loads(line)["exit_at"])
    threading.Thread(target=_watchdog, args=(exit_at,), daemon=True).start()
    os.nice(5)  # requests come first

    from safetensors import SafetensorError

    from app.jobs.schemas import TASK
    from app.training.reader import database_errors
    from ncr_core.errors import NcrError, lacks_device_memory, lacks_memory

    task = TASK.validate_json(line)

    def report(progress: Progress) -> None:
        _answer(answers, {"progress": progress | {"peak_bytes": peak_bytes()}})

    try:
        summary = run_task(task, report)
        # With the version and its job: what the next training of this size is going to take.
        summary.get("metrics", summary)["peak_bytes"] = peak_bytes()
        _answer(answers, {"done": summary})
    except NcrError as error:
        _answer(answers, {"failed": str(error)})
    except database_errors() as error:
        # By its type alone: a driver's message may name hosts and accounts.
        reason = f"the database was unavailable or refused the query ({type(error).__name__})"
        _answer(answers, {"failed": f"{reason}: the job could not read its data"})
    except (OSError, SafetensorError) as error:
        # A full disk, above all.
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if name := getattr(error, "filename", None):
            reason = f"{reason} ({name})"
        _answer(answers, {"failed": f"the job could not read or write its files: {reason}"})
    except (RuntimeError, MemoryError) as error:  # torch's and numpy's
        if not lacks_memory(error):
            raise
        where = "on the GPU " if lacks_device_memory(error) else ""
        _answer(answers, {"failed": f"not enough memory {where}for this job"})


def run_task(task: Task, report: OnProgress, retry: Retry | None = None) -> dict[str, Any]:
    """Does a task in this process and returns its summary.

    The child uploads its own files, so that a worker that loses the job, or has to stop, can kill
    the child in the middle of an upload.
    """
    from app.core.settings import load_settings
    from app.jobs.schemas import ExportTask, PrecomputeTask
    from app.registry.service import open_checkpoint_store, open_export_store
    from app.training.descriptions import Descriptions
    from app.training.engines import rank_engine
    from app.training.gate import IncumbentComparison
    from app.training.pipeline import train_and_evaluate
    from app.training.progress import phase_progress
    from app.training.reader import Retry, TrainingReader
    from app.worker.precompute import precompute
    from ncr_core.data.array_storage import storing_tables
    from ncr_core.errors import CheckpointError

    # What is not in the task is as the environment says, which the worker's is too.
    settings = load_settings(**task.settings.model_dump())
    store = open_checkpoint_store(settings)
    retry = retry or Retry(task.retry_seconds)
    reader = TrainingReader(settings, store, task.device, retry)
    if isinstance(task, ExportTask):
        from app.worker.export import export

        return export(task.job_id, task.params, reader, open_export_store(settings), report)
    reader.check_store(task.version)
    if isinstance(task, PrecomputeTask):
        with storing_tables(_table_storage(settings)):
            summary = precompute(task.version, reader, report)
        if store.remote:
            retry(lambda: store.publish_candidates(task.version), CheckpointError)
        return summary
    engine = rank_engine(settings)
    expected_seconds = task.expected_seconds
    report(
        phase_progress("read events", sum(expected_seconds.values()) if expected_seconds else None)
    )
    interactions, snapshot = reader.read_events(task.params)
    with snapshot, storing_tables(_table_storage(settings)):
        wanted = task.params.attributes
        names = settings.attribute_names if wanted is None else None if wanted == "auto" else wanted
        descriptions = None if names == [] else Descriptions.of(reader, names)
        summary = train_and_evaluate(
            interactions,
            task.params,
            task.device,
            store.folder(task.version).resolve(),
            report,
            IncumbentComparison(reader, snapshot, task.gate_margin),
            expected_seconds,
            settings.train_budget,
            retry,
            engine,
            descriptions,
        ) | {"trained_seq": snapshot.last_seq}
    if store.remote:
        report(phase_progress("upload"))
        retry(lambda: store.publish(task.version), CheckpointError)
    return summary


def _table_storage(settings: Settings) -> ArrayStorage:
    """The storage of this process's tables: files, if no rank holds whole ones."""
    from ncr_core.data.array_storage import IN_MEMORY, FileStorage

    if settings.train_engine == "local" or settings.train_tables == "replicated":
        return IN_MEMORY
    folder = settings.trainings_folder
    folder.mkdir(parents=True, exist_ok=True)
    return FileStorage(folder)


def peak_bytes() -> int:
    """The peak memory of this process, in bytes."""
    try:  # getrusage would include what the worker held when it started this process
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _watchdog(exit_at: float) -> None:
    """Ends this process when its worker is dead, or at the latest moment that the worker sent."""
    pipe, read = sys.stdin.fileno(), b""
    while True:
        left = exit_at - clock()
        # A call that keeps the interpreter to itself, as of SciPy on large matrices, can take
        # longer than a lease: the renewals that came meanwhile count.
        if not select.select([pipe], [], [], max(0.0, min(left, WAKE_SECONDS)))[0]:
            if left <= 0:
                break
            continue
        if not (sent := os.read(pipe, 4096)):
            os._exit(1)
        *lines, read = (read + sent).split(b"\n")
        if lines:
            exit_at = float(lines[-1])
    os._exit(EXIT_LEASE_OVER)


if __name__ == "__main__":
    main()
