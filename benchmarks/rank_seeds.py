"""Metrics on P1 of trainings in one process and in ranks, over training seeds.

    python -m benchmarks.rank_seeds ROOT [SEEDS [RANKS]]

Each row has the test metrics over all items of MovieLens 1M (ROOT holds ml-1m), as mean and
standard deviation over the seeds 0 to SEEDS − 1, 5 by default. The recipe is `next-item-nbpr`. The
ranks are processes of this machine, 2 by default, with replicated tables. They share each batch, so
that they differ from one process by the dropout that they draw.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import publish, run_command
from ncr_core.evaluation.protocols import ModelRanks, evaluate_full
from ncr_core.recipes import recipe
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.training import train_model
from ncr_core.training.torchrun import TorchrunEngine

RECIPE = "next-item-nbpr"
COLUMNS = ["processes", "HR@10", "± of HR@10", "NDCG@10", "± of NDCG@10", "NDCG@10 of each seed"]


def main(root: Path, seeds: int = 5, ranks: int = 2) -> None:
    split = load_dataset("ml-1m", root).split
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, ranks):
            phases = None
            if processes > 1:
                phases = TorchrunEngine(processes, "replicated", Path(folder))
            found = []
            for seed in range(seeds):
                one = recipe(RECIPE).with_(seed=seed)
                trained = train_model(one.model, one.training, split, run_phase=phases)
                metrics = evaluate_full(ModelRanks(trained.model), split, split.test, seed=0)
                found.append(metrics)
                print(processes, seed, metrics.hr, metrics.ndcg, flush=True)
            hr = [metrics.hr for metrics in found]
            ndcg = [metrics.ndcg for metrics in found]
            figures = [f(values) for values in (hr, ndcg) for f in (statistics.mean, _spread)]
            rows.append([processes, *figures, [round(value, 5) for value in ndcg]])
            publish("P1", COLUMNS, rows, recipe=RECIPE, seeds=seeds, tables="replicated")


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    run_command(main)
