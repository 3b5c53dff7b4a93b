"""What every benchmark prints and keeps."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ncr_core.checkpoint import software_versions

RESULTS = Path(__file__).parent / "results"


def publish(name: str, columns: list[str], rows: list[list[Any]], **more: Any) -> None:
    """Prints a table and writes ``results/NAME.json`` with machine, versions and commit."""
    texts = [columns, *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    print(f"\n{name}")
    for row in texts:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    result = {
        "benchmark": name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "software": software_versions(),
        **more,
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.2f}" if cell >= 1 else f"{cell:.4f}"
    return "" if cell is None else str(cell)


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
