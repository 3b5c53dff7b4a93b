"""The memory of ranks whose embedding tables are replicated, or sharded by rows.

    python -m benchmarks.rank_tables [SCRATCH [ITEMS [FACTORS]]]
    python -m benchmarks.rank_tables job [SCRATCH [ITEMS ...]]
    python -m benchmarks.rank_tables limit [SCRATCH [LIMIT_MIB]]
    python -m benchmarks.rank_tables disk [SCRATCH [ITEMS [FACTORS]]]

The data are 20,000 interactions at random of 2,000 users with 2,000,000 items. The model is NBPR
with users from their histories, which has two tables of items, and 64 factors. Each row is a phase
of one epoch with dense Adam and the validation by the whole catalogue, by the engine `torchrun`
with ranks of a thread each. Replicated ranks share the validation out, and with sharded tables
rank 0 validates. Who validates has the table of items in float64 and float32 for it, with sharded
tables in files. SCRATCH is a folder with room for 15 times the tables.

own MiB     the most memory of the largest rank that no file backs, sampled 20 times a second
            (Linux); mapped files of the tables are not in it, as the system can reclaim them
start MiB   the process that starts the ranks, which holds the whole model, or has it in files with
            sharded tables; the ids and the libraries are part of it

``job`` measures the process of a whole training job with two ranks and sharded tables, from the
events in memory to the checkpoint: start, evaluation, two baselines, gate and what follows. Its
tables are in files, as in the service, or in memory. The model is that of the recipe
`next-item-nbpr` with 64 factors and one epoch, and the data are 400,000 interactions at random of
40,000 users.

own MiB     the most memory of the job's process that no file backs
disk MiB    the most room on the disk of SCRATCH: the files of the ranks that have a name, and the
            files without a name of the job's process
tables MiB  the two tables of items of the model

``limit`` trains with every process in a control group (Linux, root) that limits its memory, mapped
files included. The limit is below the size of the tables, so that no process can hold them. The
kernel kills a process that exceeds it. The data are 20,000 interactions of 200 users with 3,000,000
items. SCRATCH has to be on a disk: files in memory count, and cannot be reclaimed.

``disk`` has the most room that the ranks' files take in three epochs.

limit MiB   the limit of each process
ended       trained, or killed with the first process
s           of the whole command
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import publish, run_command
from benchmarks.scale import of_ranks, watched
from ncr_core.data import Interactions, leave_latest_out

USERS, INTERACTIONS = 2_000, 20_000
JOB_USERS, JOB_INTERACTIONS, JOB_FACTORS = 40_000, 400_000, 64
JOB_ITEMS = (200_000,)
JOB_COLUMNS = ["items", "storage", "own MiB", "disk MiB", "tables MiB", "s"]
COLUMNS = ["tables", "ranks", "own MiB", "start MiB", "epoch s"]
MODES = (("replicated", 2), ("sharded", 2), ("sharded", 4), ("sharded", 16))
DISK_COLUMNS = ["tables", "ranks", "MiB", "times the tables"]
DISK_MODES = (("replicated", 2), ("sharded", 2))
LIMIT_COLUMNS = ["tables", "ranks", "limit MiB", "own MiB", "start MiB", "ended", "s"]
LIMITED_MODES = (("replicated", 2), ("sharded", 16))
CONTROL_GROUPS = Path("/sys/fs/cgroup")
LIMITED_USERS, LIMITED_ITEMS, LIMITED_FACTORS = 200, 3_000_000, 64


def main(scratch: Path = Path("var"), items: int = 2_000_000, factors: int = 64) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    mib = 2 * items * factors * 4 / 2**20
    for tables, ranks in MODES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            arguments = [folder, tables, str(ranks), str(items), str(factors)]
            command = [sys.executable, "-m", "benchmarks.rank_tables", "train", *arguments]
            found, largest = watched(command, lambda pid: of_ranks(pid, own_bytes), own_bytes)
        rows.append([tables, ranks, *(each / 2**20 for each in largest), *found])
        publish("tables", COLUMNS, rows, items=items, factors=factors, parameters_mib=mib)


def job(scratch: Path = Path("var"), items: tuple[int, ...] = JOB_ITEMS) -> None:
    """Measures the process of jobs with so many items."""
    scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in items:
        for storage in ("memory", "files"):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                command = [sys.executable, "-m", "benchmarks.rank_tables", "run_job"]
                found, taken = watched(
                    [*command, folder, storage, str(n)],
                    own_bytes,
                    partial(disk_bytes, folder=Path(folder)),
                )
            tables = 2 * n * JOB_FACTORS * 4
            rows.append([n, storage, *(each / 2**20 for each in (*taken, tables)), *found])
            publish("job", JOB_COLUMNS, rows, factors=JOB_FACTORS)


def disk(scratch: Path = Path("var"), items: int = 100_000, factors: int = 64) -> None:
    """Measures the most room of the ranks' files on the disk, with three epochs."""
    scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    tables_bytes = 2 * items * factors * 4
    for tables, ranks in DISK_MODES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            sizes = [str(each) for each in (ranks, items, factors, USERS, 3)]
            command = [sys.executable, "-m", "benchmarks.rank_tables", "train", folder, tables]
            _, (largest,) = watched([*command, *sizes], partial(disk_bytes, folder=Path(folder)))
        of_tables = largest / tables_bytes
        rows.append([tables, ranks, largest / 2**20, of_tables])
        publish("disk", DISK_COLUMNS, rows, items=items, factors=factors, epochs=3)


def limit(scratch: Path = Path("var"), limit_mib: int = 1200) -> None:
    """Trains with every process under a limit of memory below the size of the tables."""
    scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    for tables, ranks in LIMITED_MODES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            of_model = [str(LIMITED_ITEMS), str(LIMITED_FACTORS), str(LIMITED_USERS)]
            arguments = ["train", folder, tables, str(ranks), *of_model]
            command = [sys.executable, "-m", "benchmarks.rank_tables", *arguments]
            started = time.perf_counter()
            code, *largest = limited(command, limit_mib << 20)
            seconds = time.perf_counter() - started
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"failed: {' '.join(command)}")
        ended = "killed" if code else "trained"
        row = [tables, ranks, limit_mib, *(each / 2**20 for each in largest), ended, seconds]
        rows.append(row)
        mib = 2 * LIMITED_ITEMS * LIMITED_FACTORS * 4 / 2**20
        publish("limit", LIMIT_COLUMNS, rows, items=LIMITED_ITEMS, parameters_mib=mib)


def limited(command: list[str], limit: int) -> tuple[int, int, int]:
    """Runs a command whose processes may each have so many bytes.

    Returns its exit status and the most own bytes of a rank and of the process itself.
    """
    first = CONTROL_GROUPS / "memory"
    parent, name = (
        (first, "memory.limit_in_bytes") if first.is_dir() else (CONTROL_GROUPS, "memory.max")
    )
    groups: dict[int, Path] = {}
    largest = [0, 0]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while process.poll() is None:
            for pid in family(process.pid):
                with suppress(OSError, IndexError):  # it has just ended
                    if pid not in groups:
                        group = groups[pid] = parent / f"ncr-{pid}"
                        group.mkdir()
                        (group / name).write_text(str(limit))
                        (group / "cgroup.procs").write_text(str(pid))
                    is_rank = b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    if is_rank or pid == process.pid:
                        place = int(not is_rank)
                        largest[place] = max(largest[place], own_bytes(pid))
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        for group in groups.values():
            remove_group(group)
    return process.returncode, largest[0], largest[1]


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]


def remove_group(group: Path) -> None:
    """Ends what is left in a control group, and removes the group."""
    for pid in (group / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def run_job(folder: Path, storage: str, items: int) -> None:
    """Trains and evaluates a model; prints its seconds."""
    from app.jobs.schemas import TrainParams
    from app.training.pipeline import train_and_evaluate
    from ncr_core.data.array_storage import IN_MEMORY, FileStorage, storing_tables
    from ncr_core.training.torchrun import TorchrunEngine

    params = TrainParams.model_validate(
        {
            "recipe": "next-item-nbpr",
            "factors": JOB_FACTORS,
            "epochs": 1,
            "force": True,
            "min_interactions": 1,
        }
    )
    ranks = TorchrunEngine(2, "sharded", folder)
    data = random_interactions(items, JOB_USERS, JOB_INTERACTIONS)
    started = time.perf_counter()
    with storing_tables(FileStorage(folder) if storage == "files" else IN_MEMORY):
        train_and_evaluate(
            data, params, "cpu", folder / "model", lambda progress: None, engine=ranks
        )
    print(json.dumps([time.perf_counter() - started]))


def random_interactions(items: int, users: int, interactions: int) -> Interactions:
    """As many interactions of each user, with items at random."""
    rng = np.random.default_rng(0)
    of_users = np.repeat(np.arange(users), interactions // users)
    return Interactions.from_arrays(
        of_users,
        rng.integers(items, size=len(of_users)),
        user_ids=[f"u{n}" for n in range(users)],
        item_ids=[f"i{n}" for n in range(items)],
        times=np.arange(len(of_users), dtype=np.float64),
    )


def own_bytes(pid: int) -> int:
    """The memory of a process that no file backs, in bytes; 0 once it has ended."""
    _, found, rest = Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")
    return 1024 * int(rest.split()[0]) if found else 0


def disk_bytes(pid: int, folder: Path) -> int:
    """The size of the files in a folder, and of those without a name that a process maps."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 * path.is_file()
    mapped = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, _, offset, _, inode, *name = line.split()
        if name and name[0].startswith(str(folder)) and name[-1] == "(deleted)":
            first, end = (int(each, 16) for each in bounds.split("-"))
            mapped[inode, offset] = end - first
    return total + sum(mapped.values())


def train(
    folder: Path,
    tables: str,
    ranks: int,
    items: int,
    factors: int,
    users: int = USERS,
    epochs: int = 1,
) -> None:
    """Trains with so many ranks; prints figures."""
    from ncr_core.data.array_storage import IN_MEMORY, FileStorage, storing_tables
    from ncr_core.models import ModelConfig
    from ncr_core.training import TrainConfig, train_model
    from ncr_core.training.torchrun import TorchrunEngine

    data = random_interactions(items, users, INTERACTIONS)
    config = TrainConfig(
        shared_negatives=512, loss="listwise", epochs=epochs, optimizer="dense", validation="full"
    )
    model = ModelConfig(kind="nbpr", factors=factors, users="history")
    phases = TorchrunEngine(ranks, "sharded" if tables == "sharded" else "replicated", folder)
    split = leave_latest_out(data)
    storage = FileStorage(folder) if tables == "sharded" else IN_MEMORY
    with storing_tables(storage):
        history = train_model(model, config, split, shrink=False, run_phase=phases).history[0]
    print(json.dumps([history.seconds[0]]))


if __name__ == "__main__":
    run_command(main, train=train, job=job, run_job=run_job, disk=disk, limit=limit)
