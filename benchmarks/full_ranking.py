"""The held-out items of 1,000 users among the whole catalogue: by one process, and by two ranks.

    python -m benchmarks.full_ranking [SCRATCH]

That is what the evaluation of a training does once, and the gate for each of two models. One
process has a thread for each core, and two ranks share out the threads. The seconds of ranks
include their start and the files between the processes. The positions that both find are compared.

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
from ncr_core.data.snapshot import Snapshot
from ncr_core.data.splits import Split, hold_out_users, leave_latest_out
from ncr_core.evaluation.protocols import full_ranks, of_random_users
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.recipes import recipe
from ncr_core.training import rank_engine, train_model
from ncr_core.training.torchrun import TorchrunEngine

RANKS = 2
PRODUCT_ITEMS, TOWER_ITEMS, EVENTS = 2_000_000, 100_000, 300_000
SEEN = 20  # of each user's items, with the held-out one
COLUMNS = ["model", "items", "one process s", f"{RANKS} ranks s", "users with the same position"]


def product() -> tuple[PairwiseRanker, Split]:
    """NBPR with many items, and users with items at random."""
    config = ModelConfig(kind="nbpr", factors=64)
    torch.manual_seed(0)
    model = build_model(config, FULL_USERS, PRODUCT_ITEMS).requires_grad_(False).eval()
    items = np.random.default_rng(0).integers(PRODUCT_ITEMS, size=FULL_USERS * SEEN)
    data = Interactions.from_arrays(
        np.repeat(np.arange(FULL_USERS), SEEN),
        items,
        user_ids=[f"u{n}" for n in range(FULL_USERS)],
        item_ids=[f"i{n}" for n in range(PRODUCT_ITEMS)],
    )
    return model, leave_latest_out(data)


def tower(scratch: Path) -> tuple[PairwiseRanker, Split]:
    """A NeuPR that has learned a little."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        write_synthetic(Path(folder) / "snapshot", EVENTS, TOWER_ITEMS)
        data = Snapshot.open(Path(folder) / "snapshot").read()
    split = leave_latest_out(data, hold_out_users(data)[0])
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
        held_out = of_random_users(split.test, FULL_USERS)
        full_ranks(_ranks(model, held_out), split, of_random_users(split.test, 2), 0)  # compiles
        seconds, found = [], []
        for rank in (full_ranks, engine.full_ranks):
            started = time.perf_counter()
            found.append(rank(_ranks(model, held_out), split, held_out, 0)[0])
            seconds.append(time.perf_counter() - started)
        same = int((found[0] == found[1]).sum())
        config = model.config
        rows.append([f"{config.kind} {config.factors}", model.n_items, *seconds, same])
        publish("full_ranking", COLUMNS, rows, users=FULL_USERS, threads=torch.get_num_threads())


def _ranks(model: PairwiseRanker, held_out: np.ndarray[Any, Any]) -> VectorRanks:
    return VectorRanks.as_trained(model, np.flatnonzero(held_out >= 0))


if __name__ == "__main__":
    run_command(main)
