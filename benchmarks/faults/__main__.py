"""`make faults`: every long run, or some: `make faults ARGS="outages fuzz"`.

    python -m benchmarks.faults [NAME ...]
    python -m benchmarks.faults NAME NUMBER ...

Numbers are the arguments of one run's `main`: how many rounds, and for `server_kill` and
`worker_kill` how many loops divide those of each kind of database among them. 1,000 kills:

    python -m benchmarks.faults server_kill 400 2
    python -m benchmarks.faults worker_kill 100 3
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.faults import (
    disk_full,
    fuzz,
    group_stop,
    memory,
    outages,
    rolling_upgrade,
    server_kill,
    worker_kill,
)

RUNS: dict[str, Callable[..., None]] = {
    "server_kill": server_kill.main,
    "worker_kill": worker_kill.main,
    "group_stop": group_stop.main,
    "outages": outages.main,
    "disk_full": disk_full.main,
    "rolling_upgrade": rolling_upgrade.main,
    "visibility": outages.measure_visibility,
    "fuzz": fuzz.main,
    "memory": memory.main,
}


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.isdigit()] or list(RUNS)
    if unknown := sorted(set(names) - set(RUNS)):
        sys.exit(f"there is no run {unknown[0]!r}: {', '.join(RUNS)}")
    if len(names) == 1:
        RUNS[names[0]](*map(int, sys.argv[2:]))
        return
    command = [sys.executable, "-m", "benchmarks.faults"]
    if failed := [name for name in names if subprocess.run([*command, name]).returncode]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
