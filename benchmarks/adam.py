"""Adam on whole tables or on the rows of a batch: which is faster, by the size of the table.

    python -m benchmarks.adam

A step of NBPR with 64 factors on random interactions, 4,096 positives with 4 negatives each; the
users' table grows. ``ncr_core.training.optimizers.SPARSE_FROM`` is read off here.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.report import publish
from ncr_core.data import Interactions
from ncr_core.models import ModelConfig, build_model
from ncr_core.training import TrainConfig
from ncr_core.training.loop import epoch_of

USERS = (6_000, 25_000, 50_000, 100_000, 400_000)
ITEMS = 3_000
EACH = 10
STEPS = 20
BATCH = 4_096


def main() -> None:
    rows: list[list[Any]] = []
    for n_users in USERS:
        train = _random(n_users)
        seconds = {kind: _step(train, kind) for kind in ("dense", "sparse")}
        dense, sparse = (round(1e3 * seconds[kind], 1) for kind in ("dense", "sparse"))
        rows.append([n_users, round(n_users / BATCH, 1), dense, sparse, round(sparse / dense, 2)])
    publish("adam", ["users", "rows for one of a batch", "dense ms", "by rows ms", "ratio"], rows)


def _random(n_users: int) -> Interactions:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(n_users), EACH)
    items = rng.integers(ITEMS, size=len(users))
    ids = [[str(i) for i in range(n)] for n in (n_users, ITEMS)]
    return Interactions.from_arrays(users, items, user_ids=ids[0], item_ids=ids[1])


def _step(train: Interactions, optimizer: str) -> float:
    """The fastest of three rounds: the machine's noise only ever adds."""
    config = TrainConfig(batch_size=BATCH, optimizer=optimizer)  # type: ignore[arg-type]
    model = build_model(ModelConfig(kind="nbpr", factors=64), train.n_users, train.n_items)
    best = float("inf")
    for _ in range(3):
        epoch_of(model, train, config, lambda rows: islice(rows, 1))
        started = time.perf_counter()
        epoch_of(model, train, config, lambda rows: islice(rows, STEPS))
        best = min(best, (time.perf_counter() - started) / STEPS)
    return best


if __name__ == "__main__":
    main()
