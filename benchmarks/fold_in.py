"""What folding in gives and takes.

    python -m benchmarks.fold_in ROOT [latency|users|items ...]
    python -m benchmarks.fold_in newcomers DATA

ROOT holds ml-1m. Users: a fifth of them are left out of training and folded in from their events,
by P1 on their latest item, beside a model that was trained with them. Items: a hundred are left
out, folded in from 5 and 20 of their users, and looked for in the lists of others, by users'
vectors as of before the item and by those of all that users did (``compare_items``). Latency:
random weights, one core. The models are kept in var/fold-in; their training takes an hour of one
core. Newcomers: what is next after their first events, by the recipe that `auto` chooses for
sequences, on DATA as `ncr import` takes it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fold_in_quality import (
    CURVE_COLUMNS,
    ITEM_COLUMNS,
    KINDS,
    NEWCOMER_COLUMNS,
    USER_COLUMNS,
    compare_items,
    compare_newcomers,
    compare_users,
)
from benchmarks.harness import publish, run_command
from ncr_core.data.dataset import load_interactions
from ncr_core.fold_in import Evidence, FoldIn, FoldInConfig, ItemFoldIn
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.recipes import WINDOWS
from ncr_core.reproduction.datasets import load_dataset

ITEMS, USERS, EVENTS, BATCH = 20_000, 1_000, 200, 32
REPEATS = 15
LATENCY_COLUMNS = ["model", "way", "ms alone", "ms a user of 32", "slowest alone"]
SHAPES: list[tuple[str, ModelConfig]] = [
    ("NBPR-8", ModelConfig(kind="nbpr", factors=8)),
    ("DNCR-8", ModelConfig(kind="dncr", factors=8)),
    ("NeuPR-8", ModelConfig(kind="neupr", factors=8)),
    (
        "NeuPR-8 history",
        ModelConfig(kind="neupr", factors=8, users="history", windows=WINDOWS, item_bias=True),
    ),
    ("NeuPR-64", ModelConfig(kind="neupr", factors=64)),
]


def random_model(shape: ModelConfig) -> PairwiseRanker:
    """Weights as large as trained ones: by them the fit takes as many steps."""
    torch.manual_seed(0)
    model = build_model(shape, USERS, ITEMS)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "tower" not in name and values.ndim == 2:
                values.normal_(std=0.3)
    return model.requires_grad_(False).eval()


def latency() -> list[list[Any]]:
    """Rows for each shape and way, by the median of several runs, each with other users."""
    rows: list[list[Any]] = []
    for name, shape in SHAPES:
        model = random_model(shape)
        ways = {"compiled": FoldIn(model)}
        if shape.users == "free":
            ways["torch"] = FoldIn(model, compiled=False)
        else:
            ways = {"pooled": FoldIn(model)}
        for way, fold_in in ways.items():
            rows.append([name, way, *_timed(fold_in)])
            print(rows[-1], flush=True)
    model = random_model(SHAPES[2][1])
    of_items = ItemFoldIn(model)
    some = model.user_vectors(torch.arange(20))
    for takers in (some[:5], some):
        times = [_seconds(of_items, [takers]) for _ in range(REPEATS)]
        rows.append(
            ["NeuPR-8", f"an item, {len(takers)} users", np.median(times) * 1e3, None, None]
        )
    return rows


def _timed(fold_in: FoldIn) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    n = fold_in.model.n_items
    users = iter(lambda: Evidence(rng.permutation(n)[:EVENTS]), None)
    fold_in([next(users) for _ in range(2)])
    alone = [_seconds(fold_in, [next(users)]) for _ in range(REPEATS)]
    together = [
        _seconds(fold_in, [next(users) for _ in range(BATCH)]) / BATCH for _ in range(REPEATS)
    ]
    return float(np.median(alone)) * 1e3, float(np.median(together)) * 1e3, max(alone) * 1e3


def _seconds(call: Callable[[Any], Any], argument: Any) -> float:
    started = time.thread_time()
    call(argument)
    return time.thread_time() - started


WORK = Path("var/fold-in")


def main(root: Path, parts: tuple[str, ...] = ("latency", "users", "items")) -> None:
    torch.set_num_threads(1)
    settings = vars(FoldInConfig())
    kinds = {
        kind: {"model": shape.as_dict(), "training": config.as_dict()}
        for kind, (shape, config) in KINDS.items()
    }
    if "latency" in parts:
        publish(
            "fold-in-latency",
            LATENCY_COLUMNS,
            latency(),
            events=EVENTS,
            catalogue=ITEMS,
            settings=settings,
        )
    if {"users", "items"} & set(parts):
        every = load_dataset("ml-1m", root).split.all_seen
    if "users" in parts:
        rows, curve = compare_users(every, WORK)
        publish("fold-in-users", USER_COLUMNS, rows, data="ml-1m", settings=settings, models=kinds)
        publish("fold-in-events", CURVE_COLUMNS, curve, data="ml-1m", settings=settings)
    if "items" in parts:
        rows = compare_items(every, WORK)
        publish("fold-in-items", ITEM_COLUMNS, rows, data="ml-1m", settings=settings)


def newcomers(data: Path) -> None:
    torch.set_num_threads(1)
    every = load_interactions(data).interactions
    rows = compare_newcomers(every)
    publish(f"newcomers-{data.name}", NEWCOMER_COLUMNS, rows, interactions=every.nnz)


if __name__ == "__main__":
    run_command(main, newcomers=newcomers)
