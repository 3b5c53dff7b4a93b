"""Two splits of MovieLens 1M without the users of whom one split tests what chose on the other.

    python -m benchmarks.shared_items ROOT

ROOT holds ml-1m and ml-1m-sasrec. Both splits hold out items of the same users, in another order of
items of the same second. For some users the validation item of one split is the test item of the
other. The rows are means over the stored seeds, of all users and of the users without such an item.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import publish, run_command
from ncr_core.data import Split
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.reproduction.results_store import ResultsStore, ranks_from_text

RESULTS = ResultsStore(Path(__file__).parent / "results")
SEEDS = ("", "-seed1", "-seed2", "-seed3", "-seed4")
COLUMNS = ["split", "result", "seeds", "users", "users without such an item"]
COLUMNS += ["HR@10", "NDCG@10", "HR@10 without them", "NDCG@10 without them"]
CELLS = {
    "ml-1m": {
        "linear-next-item": ("",),
        "nbpr-next-item-with-start-d128": SEEDS,
        "nbpr-attention-d128": SEEDS,
        "nbpr-two-layer-attention-d128": SEEDS,
    },
    "ml-1m-sasrec": {
        "linear-next-item": ("",),
        "sasrec-d64": ("",),
        "sasrec-ce-d64": ("",),
        "nbpr-next-item-with-start-d128": SEEDS,
        "nbpr-attention-d128": SEEDS,
        "nbpr-two-layer-attention-d128": SEEDS,
    },
}
K = 10


def main(root: Path) -> None:
    splits = {name: load_dataset(name, root).split for name in CELLS}
    rows: list[list[Any]] = []
    for name, cells in CELLS.items():
        (other,) = (split for key, split in splits.items() if key != name)
        kept = without_choice_of(splits[name], other)
        for cell, seeds in cells.items():
            of_seeds = []
            for seed in seeds:
                stored = RESULTS.read(f"cells/{name}/{cell}{seed}")
                if stored is None:
                    raise SystemExit(f"{cell}{seed} of {name} is not stored")
                ranks = ranks_from_text(stored["ranks"]["full"])
                parts = (ranks, ranks[kept])
                of_seeds.append([metric(part, K) for part in parts for metric in (hit_ratio, ndcg)])
            means = np.mean(of_seeds, axis=0).round(5).tolist()
            rows.append([name, cell, len(seeds), len(kept), sum(kept), *means])
    publish("shared_items", COLUMNS, rows)


def without_choice_of(split: Split, other: Split) -> list[bool]:
    """Whether the test item of each tested user is not the validation item of the other split."""
    chosen = {
        (user, other.train.item_ids[item])
        for user, item in zip(other.train.user_ids, other.validation.tolist(), strict=True)
        if item >= 0
    }
    return [
        (user, split.train.item_ids[item]) not in chosen
        for user, item in zip(split.train.user_ids, split.test.tolist(), strict=True)
        if item >= 0
    ]


if __name__ == "__main__":
    run_command(main)
