"""The best of the whole catalogue for an additive model, beside numpy and implicit.

    python -m benchmarks.catalogue CHECKPOINT

numpy: a product of matrices, argpartition, and a sort of what it leaves. implicit: ``recommend`` of
its matrix factorisation with the same vectors. One thread; the fastest of several runs, in turns
whose order is drawn.
"""

from __future__ import annotations

import os
import random

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from implicit.cpu.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix

from benchmarks.report import publish
from ncr_core.checkpoint import load_checkpoint
from ncr_core.ranking import ExactRanker

K = 10
BATCHES = (1, 64)
REPEATS = 200


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = load_checkpoint(folder).model
    ranker = ExactRanker(model)
    table = ranker.margins.single.linear
    if table is None or not ranker.margins.sortable:
        sys.exit("this model is no product of vectors")
    items = table.items.numpy()
    rows: list[list[Any]] = []
    generator = random.Random(0)
    for batch in BATCHES:
        users = model.user_vectors(torch.arange(batch))
        own = users[:, table.columns].numpy()
        als = AlternatingLeastSquares(factors=items.shape[1], num_threads=1)
        als.user_factors, als.item_factors = own, items
        seen = csr_matrix((batch, len(items)), dtype=np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "ours": partial(_ours, ranker, users),
            "numpy": partial(_numpy, own, items),
            "implicit": partial(_implicit, als, seen),
        }
        lists = [call() for call in calls.values()]
        if table.bias is None and not all(np.array_equal(lists[0], other) for other in lists):
            raise AssertionError("the lists differ")
        times = dict.fromkeys(calls, float("inf"))
        turns = list(calls)
        for _ in range(REPEATS):
            generator.shuffle(turns)  # each finds what another left in the processor's caches
            for name in turns:
                started = time.perf_counter()
                calls[name]()
                times[name] = min(times[name], time.perf_counter() - started)
        milliseconds = [seconds * 1e3 for seconds in times.values()]
        rows.append(
            [batch, *milliseconds, *(other / milliseconds[0] for other in milliseconds[1:])]
        )
    publish(
        f"catalogue-{model.config.kind}-{model.config.factors}",
        ["batch", "ours ms", "numpy ms", "implicit ms", "numpy / ours", "implicit / ours"],
        rows,
        model=model.config.as_dict(),
        items=len(items),
        k=K,
        threads=1,
    )


def _ours(ranker: ExactRanker, users: torch.Tensor) -> Any:
    return ranker.top(users, K).numpy()


def _numpy(own: Any, items: Any) -> Any:
    scores = own @ items.T
    some = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1)
    return np.take_along_axis(some, order, 1)


def _implicit(als: Any, seen: Any) -> Any:
    users = np.arange(seen.shape[0])
    return als.recommend(users, seen, N=K, filter_already_liked_items=False)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
