"""The seconds of each phase of a training of the service, as its data grow.

    python -m benchmarks.phases [SCRATCH [RECIPE [FACTORS [ITEMS [EVENTS ...]]]]]

The data are those of `benchmarks.scale`: a user for every 20 events, and by default 20,000 items.
By default 1, 3 and 10 million events train the recipe `next-item-nbpr` with 64 factors in one
process. Other numbers of items, multiples of 100, have records of their own.

The phases are those that a job reports: *train* has the start and all epochs, with their
validation; *evaluate* has the metrics, the baselines up to 5 million interactions, the calibration
and the comparison with the popularity list. *learn the held-out items* is a second training where
more than 1 % of the interactions were held out, and elsewhere it makes users' vectors anew. What
runs in ranks is in docs/how-to/cluster.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.jobs.schemas import TrainParams
from app.training.pipeline import train_and_evaluate
from benchmarks.harness import publish, run_command
from benchmarks.scale import ITEMS, TOPICS, write_synthetic
from ncr_core.data.snapshot import Snapshot

SIZES = (1_000_000, 3_000_000, 10_000_000)
PHASES = ["train", "evaluate", "learn the held-out items", "write checkpoint"]


def main(
    scratch: Path = Path("var"),
    recipe: str = "next-item-nbpr",
    factors: int = 64,
    items: int = ITEMS,
    events: tuple[int, ...] = SIZES,
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    if items < TOPICS or items % TOPICS:
        sys.exit(f"the number of items is no multiple of {TOPICS}: {items}")
    record = "phases" if items == ITEMS else f"phases-{items}"
    for size in events or SIZES:
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            write_synthetic(folder / "snapshot", size, items)
            started = time.perf_counter()
            data = Snapshot.open(folder / "snapshot").read()
            read = time.perf_counter() - started
            params = TrainParams.model_validate({"recipe": recipe, "factors": factors})
            result = train_and_evaluate(
                data, params, "cpu", folder / "version", lambda progress: None
            )
            seconds = result["metrics"]["seconds"]
            rows.append([size, data.nnz, round(read, 1), *(seconds[name] for name in PHASES)])
            head = ["events", "interactions", "read", *PHASES]
            publish(record, head, rows, recipe=recipe, factors=factors, items=items)


if __name__ == "__main__":
    run_command(main)
