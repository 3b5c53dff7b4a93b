"""What every benchmark prints and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ncr_core.experiments.machine import provenance

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
        **provenance(),
        **more,
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.2f}" if cell >= 1 else f"{cell:.4f}"
    return "" if cell is None else str(cell)
