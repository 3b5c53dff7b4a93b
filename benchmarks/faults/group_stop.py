"""A stop of all processes of a service at once, as supervisors and terminals send it.

In turns `ncr worker` and `ncr serve --with-worker` are stopped while their child process runs a
training, and once more while it computes candidates: SIGTERM or SIGINT to the process group,
SIGTERM to each process in random order (as systemd does by default), and SIGKILL to the group. The
process is started again and must take the job up, and no child may outlive its parent.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

import httpx2

from benchmarks.faults.setup import (
    ENDED,
    LEASE,
    WAIT_SECONDS,
    Storage,
    add_events,
    publish_sums,
    storage,
    submit,
)
from tests.cluster.process import Process, ProcessError, is_running, wait_until
from tests.cluster.servers import NcrServer, NcrWorker, training_pids_of

SIGNALS = ("SIGTERM to the group", "SIGINT to the group", "SIGTERM to each", "SIGKILL to the group")
ORPHAN_SECONDS = 10.0
COLUMNS = [
    "stops", "held when stopped", "jobs", "succeeded", "attempts lost",
    "of them to a stopped group", "exit codes other than 0", "children left",
]  # fmt: skip


def _send(process: Process, child: int, how: str) -> None:
    number = signal.Signals[how.partition(" ")[0]]
    if how.endswith("group"):
        os.killpg(process.pid, number)
        return
    for pid in random.sample([process.pid, child], 2):
        os.kill(pid, number)


def _job(place: Storage, kind: str, known: set[str]) -> tuple[str, str, int]:
    """Id, status and attempt of the newest job of a kind that is not among the known ones."""
    query = "SELECT job_id, status, attempt FROM jobs WHERE kind = '{}' ORDER BY created_at DESC"
    for job_id, status, attempt in place.query(query.format(kind)):
        if job_id not in known:
            return str(job_id), str(status), int(attempt)
    return "", "", 0


def stop_once(
    place: Storage, process: Process, kind: str, known: set[str], how: str
) -> Counter[str]:
    """Stops a process that runs a job of this kind and starts it again; the figures."""
    wait_until(lambda: bool(training_pids_of(process.pid)), WAIT_SECONDS, f"a child for {kind}")
    (child,) = training_pids_of(process.pid)
    # A fifth of the stops come before the child has read its task.
    time.sleep(random.choice([0.0, 0.5, 1.0, 1.5, 2.0]))
    _send(process, child, how)
    code = process.wait()
    try:
        wait_until(lambda: not is_running(child), ORPHAN_SECONDS, "end of the child")
        left = 0
    except ProcessError:
        left = 1
    _, status, _ = _job(place, kind, known)
    killed = how.startswith("SIGKILL")
    in_order = how.endswith("group") and not killed
    process.start()
    wait_until(lambda: _job(place, kind, known)[1] in ENDED, WAIT_SECONDS, f"end of {kind}")
    job_id, ended, attempt = _job(place, kind, known)
    known.add(job_id)
    lost = attempt - 1
    print(kind, how, f"{status} when stopped, then {ended}, attempt {attempt}", flush=True)
    figures = (
        1, int(status not in ENDED), 1, int(ended == "succeeded"), lost, lost if in_order else 0,
        int(code != 0 and not killed), left,
    )  # fmt: skip
    return Counter(dict(zip(COLUMNS, figures, strict=True)))


def run(database: str, rounds: int) -> Counter[str]:
    """Sums over all rounds on one kind of database; each round stops a training and candidates."""
    figures: Counter[str] = Counter(dict.fromkeys(COLUMNS, 0))
    known: set[str] = set()
    with ExitStack() as stack:
        place = stack.enter_context(storage(database))
        env = place.env(**LEASE | {"NCR_PRECOMPUTE_USERS": "60", "NCR_DRAIN_NOTICE_SECONDS": "0"})
        server = stack.enter_context(NcrServer(env, place.folder / "server.log"))
        client = stack.enter_context(httpx2.Client(base_url=server.url, timeout=30))
        add_events(server.url)
        for turn in range(rounds):
            log = place.folder / f"stopped-{turn}.log"
            stopped: Process = NcrServer(env, log, with_worker=True)
            if (turn + turn // len(SIGNALS)) % 2:  # each signal meets both in eight rounds
                stopped = NcrWorker(env, log)
            with stopped:
                submit(client, seed=turn)
                stop = partial(stop_once, place, stopped, known=known)
                how = SIGNALS[turn % len(SIGNALS)]
                figures.update(stop("train", how=how))
                figures.update(stop("candidates", how=how))
    return figures


def main(rounds: int = 20) -> None:
    publish_sums("faults-group-stop", COLUMNS, run, rounds, lease_seconds=2)
