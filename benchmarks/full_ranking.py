"""The evaluation of a model by one process, and the part of it that ranks share out.

    python -m benchmarks.full_ranking [SCRATCH]

The ranks of a training look for the held-out items of 1,000 users among the whole catalogue. The
evaluation of a training does so once, and the gate for each of two models. One process does it with
one thread and with a thread for each core. Two ranks share out the cores, so that each has one on a
machine of two. The seconds of ranks include their start and the files between the processes. The
positions that all find are compared.

The rest of the evaluation stays in one process, here with a thread for each core: the held-out
items of 10,000 users among 100 others, and the calibration on such pairs. Both draw the others.

NBPR has 64 factors and embeddings at random, as the time of its products does not depend on them.
NeuPR is the recipe `spectral-neupr` after one epoch with the data of `benchmarks.scale`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import publish, run_command
from benchmarks.scale import write_synthetic
from ncr_core.comparison import FULL_USERS
from ncr_core.data import Interactions
from ncr_core.data.interactions import IntArray
from ncr_core.data.snapshot import Snapshot
from ncr_core.data.splits import Split, hold_out_users, leave_latest_out
from ncr_core.evaluation.calibration import calibrate
from ncr_core.evaluation.protocols import (
    FullRanking,
    Ranks,
    evaluate_sampled,
    full_ranks,
    of_random_users,
    sampled_candidates,
)
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.recipes import recipe
from ncr_core.training import rank_engine, train_model
from ncr_core.training.torchrun import TorchrunEngine

RANKS = 2
PRODUCT_ITEMS, TOWER_ITEMS, EVENTS = 2_000_000, 100_000, 300_000
USERS, SEEN = 10_000, 20  # users, and items of each user with the held-out one
COLUMNS = [
    "model", "items", "one thread s", "all threads s", f"{RANKS} ranks s",
    "users with the same position", "sampled s", "calibration s",
]  # fmt: skip


def product() -> tuple[PairwiseRanker, Split]:
    """NBPR with many items, and users with items at random."""
    config = ModelConfig(kind="nbpr", factors=64)
    torch.manual_seed(0)
    model = build_model(config, USERS, PRODUCT_ITEMS).requires_grad_(False).eval()
    items = np.random.default_rng(0).integers(PRODUCT_ITEMS, size=USERS * SEEN)
    data = Interactions.from_arrays(
        np.repeat(np.arange(USERS), SEEN),
        items,
        user_ids=[f"u{n}" for n in range(USERS)],
        item_ids=[f"i{n}" for n in range(PRODUCT_ITEMS)],
    )
    return model, leave_latest_out(data)


def tower(scratch: Path) -> tuple[PairwiseRanker, Split]:
    """A NeuPR that has learned a little."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        write_synthetic(Path(folder) / "snapshot", EVENTS, TOWER_ITEMS)
        data = Snapshot.open(Path(folder) / "snapshot").read()
    split = leave_latest_out(data, hold_out_users(data, at_least=USERS)[0])
    once = recipe("spectral-neupr").with_(epochs=1, fine_tune_epochs=1, validation="sampled")
    return train_model(once.model, once.training, split).model, split


class EngineThatRanks(TorchrunEngine):
    """Ranks that make lists even if they have no more threads than one process."""

    def _threads(self) -> int:
        return 1 + torch.get_num_threads()


def main(scratch: Path = Path("var")) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rank_engine.MIN_PRODUCTS = rank_engine.MIN_COMPARISONS = 0.0
    engine = EngineThatRanks(RANKS, "replicated", scratch / "ranks")
    rows: list[list[Any]] = []
    for model, split in (product(), tower(scratch)):
        listed(model, split, full_ranks, of_random_users(split.test, 2))  # compiles
        held_out = of_random_users(split.test, FULL_USERS)
        seconds, found = [], []
        for rank in (by_one_thread, full_ranks, engine.full_ranks):
            started = time.perf_counter()
            found.append(listed(model, split, rank, held_out))
            seconds.append(time.perf_counter() - started)
        same = int(((found[0] == found[1]) & (found[0] == found[2])).sum())

        started = time.perf_counter()
        candidates = sampled_candidates(split, split.test, seed=0)
        evaluate_sampled(VectorRanks.as_trained(model, candidates.users), candidates)
        sampled = time.perf_counter() - started
        started = time.perf_counter()
        calibrate(model, split)
        calibration = time.perf_counter() - started

        name = f"{model.config.kind} {model.config.factors}"
        rows.append([name, model.n_items, *seconds, same, sampled, calibration])
        publish(
            "full_ranking",
            COLUMNS,
            rows,
            users=FULL_USERS,
            sampled_users=USERS,
            threads=torch.get_num_threads(),
        )


def listed(model: PairwiseRanker, split: Split, rank: FullRanking, held_out: IntArray) -> IntArray:
    """The positions of the held-out items."""
    return rank(VectorRanks.as_trained(model, np.flatnonzero(held_out >= 0)), split, held_out, 0)[0]


def by_one_thread(
    model: Ranks, split: Split, held_out: IntArray, seed: int
) -> tuple[IntArray, int]:
    """`full_ranks` by this process with a single thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return full_ranks(model, split, held_out, seed)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run_command(main)
