"""What folding in gives and takes.

    python -m benchmarks.fold_in ROOT [latency|users|items ...]

ROOT holds ml-1m. Users: a fifth of them are left out of training and folded in from their events,
by P1 on their latest item, beside a model that was trained with them. Items: a hundred are left
out, and folded in from 5 and 20 of their users. Latency: random weights, one core. The models are
kept in var/fold-in; their training takes an hour of one core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys
from pathlib import Path

import torch

from benchmarks.fold_in import items, latency, users
from benchmarks.fold_in.trained import KINDS
from benchmarks.report import publish
from ncr_core.experiments.datasets import load_data_set
from ncr_core.fold_in import FoldInConfig

WORK = Path("var/fold-in")


def main(root: Path, parts: list[str]) -> None:
    torch.set_num_threads(1)
    settings = vars(FoldInConfig())
    kinds = {
        kind: {"model": shape.as_dict(), "training": config.as_dict()}
        for kind, (shape, config) in KINDS.items()
    }
    if "latency" in parts:
        publish(
            "fold-in-latency",
            latency.HEAD,
            latency.latency(),
            events=latency.EVENTS,
            catalogue=latency.ITEMS,
            settings=settings,
        )
    if {"users", "items"} & set(parts):
        every = load_data_set("ml-1m", root).split.all_seen
    if "users" in parts:
        rows, curve = users.quality(every, WORK)
        publish("fold-in-users", users.HEAD, rows, data="ml-1m", settings=settings, models=kinds)
        publish("fold-in-events", users.CURVE_HEAD, curve, data="ml-1m", settings=settings)
    if "items" in parts:
        found = items.quality(every, WORK)
        publish("fold-in-items", items.HEAD, found, data="ml-1m", settings=settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["latency", "users", "items"])
