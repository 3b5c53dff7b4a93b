"""`make faults`: every long run, or those that are named: `make faults ARGS="outages fuzz"`."""

from __future__ import annotations

import subprocess
import sys

RUNS = ("server_kill", "worker_kill", "outages", "disk_full", "visibility", "fuzz", "memory")


def main() -> None:
    chosen = sys.argv[1:] or RUNS
    if unknown := sorted(set(chosen) - set(RUNS)):
        sys.exit(f"there is no run {unknown[0]!r}: {', '.join(RUNS)}")
    failed = [
        name
        for name in chosen
        if subprocess.run(
            [sys.executable, "-m", f"benchmarks.faults.{name}"], check=False
        ).returncode
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
