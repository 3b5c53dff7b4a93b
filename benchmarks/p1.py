"""How good are the models after `ncr train`, by protocol P1, and how long does it take.

    python -m benchmarks.p1 DATA [FACTORS]

DATA is MovieLens 1M as `ncr train` reads it. Runs the commands that a user would run; ItemPop by
the same protocol stands beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import publish
from ncr_core.data import build_interactions, leave_latest_out, min_interactions
from ncr_core.data.readers import open_source
from ncr_core.evaluation.protocols import evaluate_full, evaluate_sampled, sampled_candidates
from ncr_core.models.baselines.popularity import Popularity

PAPER = {
    ("nbpr", 8): (0.5402, 0.2854),
    ("dncr", 8): (0.5664, 0.3037),
    ("neupr", 8): (0.5702, 0.3024),
}
SEED = 0


def main(data: Path, factors: int) -> None:
    rows = [_popularity(data)]
    for model in ("nbpr", "neupr"):
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "checkpoint"
            options = ["--model", model, "--factors", str(factors), "--seed", str(SEED)]
            started = time.perf_counter()
            _ncr("train", "--data", str(data), *options, "--out", str(out))
            seconds = time.perf_counter() - started
            found = json.loads(_ncr("evaluate", str(out), "--data", str(data), "--json"))
        paper = PAPER.get((model, factors), (None, None))
        figures = [found[kind][name] for kind in ("sampled", "full") for name in ("hr", "ndcg")]
        rows.append([model, *(round(x, 4) for x in figures), *paper, round(seconds)])
    columns = ["model", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10"]
    publish(
        f"p1-{factors}",
        [*columns, "paper HR@10", "paper NDCG@10", "train s"],
        rows,
        data=data.name,
        factors=factors,
        seed=SEED,
    )


def _ncr(*arguments: str) -> str:
    command = [sys.executable, "-c", "from app.cli import main; main()", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _popularity(data: Path) -> list[Any]:
    source = open_source(data)
    rows = (
        (row.user, row.item, row.timestamp or float(row.position or 0))
        for chunk in source.interactions(on_bad=lambda bad: None)
        for row in chunk
    )
    split = leave_latest_out(min_interactions(build_interactions(rows), 10))
    model = Popularity(split.train)
    sampled = evaluate_sampled(model, sampled_candidates(split, split.test, SEED))
    full = evaluate_full(model, split, split.test, SEED)
    figures = [sampled.hr, sampled.ndcg, full.hr, full.ndcg]
    return ["ItemPop", *(round(x, 4) for x in figures), None, None, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
