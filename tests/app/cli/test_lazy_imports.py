"""Modules that commands and waiting workers load, without torch and numba."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT_MODULES = (
    *("cli.main", "cli.serve", "core.settings", "jobs.schemas", "transfer.import_data"),
    *("worker.worker", "wiring", "transfer.backup", "transfer.restore"),
)


@pytest.mark.slow
def test_commands_and_workers_load_no_torch_before_they_train_or_rank() -> None:
    """It takes seconds of a command, and two hundred megabytes of a worker."""
    imports = "; ".join(f"import app.{name}" for name in LIGHT_MODULES)
    script = f"{imports}; import sys; print(sorted({{'torch', 'numba'}} & sys.modules.keys()))"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert process.stdout.strip() == "[]", process.stderr
