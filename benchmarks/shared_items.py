"""P1 of MovieLens 1M without the users whose test item chose a model on the split of SASRec.

    python -m benchmarks.shared_items ROOT

ROOT holds ml-1m and ml-1m-sasrec. Both splits hold out items of the same users, in another order of
items of the same second. For some users the validation item of the split of SASRec is the test item
of P1. The rows are means over the stored seeds on P1, of all users and of the users without such an
item.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import publish, run_command
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.reproduction.results_store import ResultsStore, ranks_from_text

RESULTS = ResultsStore(Path(__file__).parent / "results")
SEEDS = ("", "-seed1", "-seed2", "-seed3", "-seed4")
CELLS = {
    "linear-next-item": ("",),
    "nbpr-next-item-with-start-d128": SEEDS,
    "nbpr-attention-d128": SEEDS,
    "nbpr-two-layer-attention-d128": SEEDS,
}
K = 10


def main(root: Path) -> None:
    p1, other = (load_dataset(name, root).split for name in ("ml-1m", "ml-1m-sasrec"))
    chosen = {
        (user, other.train.item_ids[item])
        for user, item in zip(other.train.user_ids, other.validation.tolist(), strict=True)
        if item >= 0
    }
    has_other = [
        (user, p1.train.item_ids[item]) not in chosen
        for user, item in zip(p1.train.user_ids, p1.test.tolist(), strict=True)
        if item >= 0
    ]
    rows: list[list[Any]] = []
    for cell, seeds in CELLS.items():
        of_seeds = []
        for seed in seeds:
            stored = RESULTS.read(f"cells/ml-1m/{cell}{seed}")
            if stored is None:
                raise SystemExit(f"{cell}{seed} of ml-1m is not stored")
            ranks = ranks_from_text(stored["ranks"]["full"])
            parts = (ranks, ranks[has_other])
            of_seeds.append([metric(part, K) for part in parts for metric in (hit_ratio, ndcg)])
        rows.append([cell, len(seeds), *np.mean(of_seeds, axis=0).round(5).tolist()])
    head = ["result", "seeds", "HR@10", "NDCG@10", "HR@10 without them", "NDCG@10 without them"]
    users = len(has_other)
    publish("shared_items", head, rows, users=users, without_them=sum(has_other))


if __name__ == "__main__":
    run_command(main)
