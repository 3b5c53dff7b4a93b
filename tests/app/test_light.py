"""What is light: commands that read or move rows, and a worker that waits."""

from __future__ import annotations

import subprocess
import sys

LIGHT = ("cli.serve", "imports", "jobs.worker", "services", "transfer.backup", "transfer.restore")


def test_what_trains_and_ranks_nothing_loads_no_torch() -> None:
    """It takes seconds of a command, and two hundred megabytes of a worker."""
    imports = "; ".join(f"import app.{name}" for name in LIGHT)
    script = f"{imports}; import sys; print(sorted({{'torch', 'numba'}} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
