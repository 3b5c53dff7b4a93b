"""What every benchmark needs: its arguments, data, times taken in turns, and a result file."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import sys
import time
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ncr_core.reproduction.results_store import provenance

RESULTS = Path(__file__).parent / "results"
RESULTS_VARIABLE = "BENCHMARK_RESULTS"  # of the environment: a folder in their place


def run_command(main: Callable[..., None], **others: Callable[..., None]) -> None:
    """Calls ``main`` with the command's arguments, which are its parameters in their order.

    A parameter with a default may be left out; one that is a tuple takes all that is left. If the
    first argument is the name of one of the ``others``, that function is called with the rest.
    """
    arguments = sys.argv[1:]
    if arguments and arguments[0] in others:
        main = others[arguments.pop(0)]
    parser = argparse.ArgumentParser(
        description=getattr(inspect.getmodule(main), "__doc__", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parameters = inspect.signature(main, eval_str=True).parameters
    for name, parameter in parameters.items():
        many = typing.get_origin(parameter.annotation) is tuple
        kind = typing.get_args(parameter.annotation)[0] if many else parameter.annotation
        if parameter.default is parameter.empty:
            parser.add_argument(name, type=kind)
        else:
            several = "*" if many else "?"
            parser.add_argument(name, type=kind, nargs=several, default=parameter.default)
    main(*vars(parser.parse_args(arguments)).values())


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """The seconds that each call takes, in rounds whose order is drawn.

    The machine's noise and what others leave in the processor's caches fall on all of them alike.
    """
    generator = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    turns = list(calls)
    for _ in range(repeats):
        generator.shuffle(turns)
        for name in turns:
            started = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def publish(name: str, columns: list[str], rows: list[list[Any]], **more: Any) -> None:
    """Prints a table and keeps it in ``results/BENCHMARK.json`` with machine, versions and commit.

    The file holds a benchmark's results by name, this one in place of an older one. Without a name
    it only prints.
    """
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
    if not name:
        return
    path = _results_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    results = sorted((published() | {name: result}).items())
    path.write_text(json.dumps(dict(results), indent=1) + "\n")


def published() -> dict[str, Any]:
    """The results of the benchmark that runs, by name."""
    path = _results_path()
    return json.loads(path.read_text()) if path.exists() else {}


def _results_path() -> Path:
    """`ranker.json` for `python -m benchmarks.ranker`, `faults.json` for `benchmarks.faults`."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.split(".")[1] if spec else "other"
    return Path(os.environ.get(RESULTS_VARIABLE, RESULTS)) / f"{module}.json"


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.2f}" if cell >= 1 else f"{cell:.4f}"
    return "" if cell is None else str(cell)
