"""How fast do models train: triples a second, and seconds to the quality of cornac's BPR.

    python -m benchmarks.training ROOT [FACTORS ...]

ROOT holds ml-1m. Everything runs one after the other in this process with the same threads.
Time to quality is on the test items of P1, the held-out item among 100 sampled ones: the first
epoch whose HR@10 is not below cornac BPR's own at its end (d = 64, its own threads), measuring
included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import publish
from ncr_core.data import Split
from ncr_core.evaluation.protocols import evaluate_sampled
from ncr_core.experiments.datasets import load_data_set
from ncr_core.models import ModelConfig, build_model
from ncr_core.models.baselines.cornac_bpr import fit_cornac_bpr
from ncr_core.models.baselines.neumf_config import NeuMFConfig
from ncr_core.models.baselines.neumf_training import fit_neumf
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.batches import Rows, SharedRows
from ncr_core.training.loop import epoch_of, validation_candidates

STEPS = 40
SHARED = {"loss": "listwise", "shared_negatives": 512, "batch_size": 4096}
WHOLE = {"loss": "listwise", "shared_negatives": 65_536, "batch_size": 32_768}
HISTORY = {"users": "history", "windows": [1, 2, 4, 8, 16, 64, 0]}

SPEEDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("NBPR", {"kind": "nbpr"}, {}),
    ("NBPR, whole catalogue", {"kind": "nbpr"}, WHOLE),
    ("NBPR history, 512 shared", {"kind": "nbpr", **HISTORY}, SHARED),
    ("DNCR", {"kind": "dncr"}, {}),
    ("NeuPR", {"kind": "neupr"}, {}),
]
CATALOGUE = {**WHOLE, "dropout": 0.3}
RACES: list[tuple[str, dict[str, Any]]] = [
    ("NBPR, eq. 15, 8 negatives", {"negatives": 8, "l2": 1e-2, "epochs": 15}),
    (
        "NBPR, listwise over the catalogue",
        {**CATALOGUE, "batch_size": 4096, "learning_rate": 1e-2, "epochs": 20},
    ),
    (
        "NBPR, listwise from a spectral start",
        {**CATALOGUE, "learning_rate": 1e-3, "epochs": 4, "start": "spectral"},
    ),
    (
        "NBPR, listwise from an ALS start",
        {**CATALOGUE, "learning_rate": 1e-3, "epochs": 4, "start": "als"},
    ),
]


def main(root: Path, sizes: list[int]) -> None:
    split = load_data_set("ml-1m", root).split
    rows = [_speed(split, *which, d) for d in sizes for which in SPEEDS]
    rows += [_neumf_speed(split, d) for d in sizes]
    publish(
        "training-speed",
        ["model", "d", "triples/s", "ms a step", "positives a step"],
        rows,
        data="ml-1m",
        threads=torch.get_num_threads(),
    )
    publish(
        "training-time-to-quality",
        ["method", "HR@10 at the end", "seconds in all", "seconds to cornac's HR@10", "ratio"],
        _races(split),
        data="ml-1m",
        factors=64,
        threads=torch.get_num_threads(),
    )


def _speed(
    split: Split, name: str, model: dict[str, Any], training: dict[str, Any], d: int
) -> list[Any]:
    """Forward, backward and update; a triple is (u, i, j) in both orders."""
    config = TrainConfig(**training)
    ranker = build_model(
        ModelConfig.from_dict({**model, "factors": d}), split.train.n_users, split.train.n_items
    ).to(config.torch_device())
    counted = [0, 0, 0]

    def some(rows: Iterator[Rows | SharedRows]) -> Iterator[Rows | SharedRows]:
        for batch in islice(rows, STEPS):
            # With shared negatives: the pairs of a user and an item that are scored.
            scored = batch.valid if isinstance(batch, SharedRows) else batch.negatives
            pairs = scored.numel()
            for at, more in enumerate((pairs, len(batch.items), 1)):
                counted[at] += more
            yield batch

    epoch_of(ranker, split.train, config, some)  # warm-up
    counted[:] = [0, 0, 0]
    started = time.perf_counter()
    epoch_of(ranker, split.train, config, some)
    seconds = time.perf_counter() - started
    pairs, positives, steps = counted
    return [name, d, round(pairs / seconds), round(1e3 * seconds / steps, 1), positives // steps]


def _neumf_speed(split: Split, d: int) -> list[Any]:
    """Of whole epochs without validation; a positive with four negatives is four triples."""
    blind = split.with_validation_in_train()
    config = NeuMFConfig(factors=d, epochs=1, pretrain=False)
    started = time.perf_counter()
    fit_neumf(blind, config)
    seconds = time.perf_counter() - started
    pairs = blind.train.nnz * config.negatives
    steps = -(-blind.train.nnz // config.batch_size)
    return ["NeuMF", d, round(pairs / seconds), round(1e3 * seconds / steps, 1), config.batch_size]


def _races(split: Split) -> list[list[Any]]:
    # History holds the metrics of "validation" items: here the test items, so that both methods'
    # quality is the same one. Nothing is chosen by it.
    turned = Split(split.train, split.test, split.validation)
    theirs = fit_cornac_bpr(split.train, 64)
    target = evaluate_sampled(theirs, validation_candidates(turned, 0)).hr
    rows: list[list[Any]] = [
        ["cornac BPR", round(target, 4), round(theirs.seconds, 1), round(theirs.seconds, 1), 1.0]
    ]
    for name, training in RACES:
        started = time.perf_counter()
        config = TrainConfig(**training, patience=training["epochs"])
        trained = train_model(ModelConfig(kind="nbpr", factors=64), config, turned)
        seconds = time.perf_counter() - started
        history = trained.history[0]
        before = seconds - sum(history.seconds)  # making candidates, the spectral start
        reached = next((at for at, hr in enumerate(history.hr, 1) if hr >= target), None)
        spent = None if reached is None else before + sum(history.seconds[:reached])
        rows.append(
            [
                name,
                round(history.hr[-1], 4),
                round(seconds, 1),
                None if spent is None else round(spent, 1),
                None if spent is None else round(spent / theirs.seconds, 2),
            ]
        )
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(d) for d in sys.argv[2:]] or [8, 64])
