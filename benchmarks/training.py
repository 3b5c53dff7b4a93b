"""How fast do models train: triples a second, seconds to the quality of cornac's BPR, and Adam.

    python -m benchmarks.training ROOT [FACTORS ...]
    python -m benchmarks.training adam

ROOT holds ml-1m. Everything runs one after the other in this process with the same threads.
Time to quality is on the test items of P1, the held-out item among 100 sampled ones: the first
epoch whose HR@10 is not below cornac BPR's own at its end (d = 64, its own threads), measuring
included.

``adam`` compares Adam on whole tables and on the rows of a batch, by the size of the table: a step
of NBPR with 64 factors on random interactions, 4,096 positives with 4 negatives each; the users'
table grows. ``ncr_core.training.trainer.MIN_SPARSE_RATIO`` is read off there. The record
``adam-items`` has more and more items instead: NBPR with users' vectors from their items, item
biases, and the loss "listwise" with 512 shared negatives. Both of its tables grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import publish, run_command
from ncr_core.data import Interactions, Split
from ncr_core.evaluation.protocols import evaluate_sampled
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.reproduction.baselines.neumf import NeuMFConfig, fit_neumf
from ncr_core.reproduction.baselines.scoring import fit_cornac_bpr
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.batches import Rows, SharedRows
from ncr_core.training.captured_gradients import CapturedGradients
from ncr_core.training.trainer import Adam, make_batches, train_epoch
from ncr_core.training.validation import validation_candidates

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


def main(root: Path, sizes: tuple[int, ...] = (8, 64)) -> None:
    split = load_dataset("ml-1m", root).split
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
            for column, more in enumerate((pairs, len(batch.items), 1)):
                counted[column] += more
            yield batch

    epoch_of(ranker, split.train, config, some)  # warm-up
    counted[:] = [0, 0, 0]
    started = time.perf_counter()
    epoch_of(ranker, split.train, config, some)
    seconds = time.perf_counter() - started
    pairs, positives, steps = counted
    return [name, d, round(pairs / seconds), round(1e3 * seconds / steps, 1), positives // steps]


def epoch_of(
    model: PairwiseRanker,
    train: Interactions,
    config: TrainConfig,
    through: Callable[[Iterator[Rows | SharedRows]], Iterable[Rows | SharedRows]],
) -> float:
    """One pass over those batches that ``through`` lets pass, at a constant rate; the mean loss."""
    batches = make_batches(model, train, config, model.device)
    optimizer = Adam(model, config, config.learning_rate, None)
    rows = through(iter(batches))
    captured = CapturedGradients(model)
    return train_epoch(model, rows, batches.n_items, config, optimizer, captured=captured)


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
    cornac = fit_cornac_bpr(split.train, 64)
    target = evaluate_sampled(cornac, validation_candidates(turned, 0)).hr
    rows: list[list[Any]] = [
        ["cornac BPR", round(target, 4), round(cornac.seconds, 1), round(cornac.seconds, 1), 1.0]
    ]
    for name, training in RACES:
        started = time.perf_counter()
        config = TrainConfig(**training, patience=training["epochs"])
        trained = train_model(ModelConfig(kind="nbpr", factors=64), config, turned)
        seconds = time.perf_counter() - started
        history = trained.history[0]
        before = seconds - sum(history.seconds)  # making candidates, the spectral start
        reached = next((epoch for epoch, hr in enumerate(history.hr, 1) if hr >= target), None)
        spent = None if reached is None else before + sum(history.seconds[:reached])
        rows.append(
            [
                name,
                round(history.hr[-1], 4),
                round(seconds, 1),
                None if spent is None else round(spent, 1),
                None if spent is None else round(spent / cornac.seconds, 2),
            ]
        )
    return rows


ADAM_USERS = (10_000, 25_000, 50_000, 100_000, 400_000)
ADAM_ITEMS, ITEMS_EACH, ADAM_STEPS, BATCH = 3_000, 10, 20, 4_096
HISTORY_USERS, HISTORY_ITEMS = 50_000, (20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000)


def measure_adam() -> None:
    free = ModelConfig(kind="nbpr", factors=64)
    rows: list[list[Any]] = []
    for n_users in ADAM_USERS:
        train = _random_interactions(n_users, ADAM_ITEMS)
        rows.append([n_users, round(n_users / BATCH, 1), *_both_ways(free, {}, train)])
    head = ["rows for one of a batch", "dense ms", "by rows ms", "ratio"]
    publish("adam", ["users", *head], rows)
    pooled = ModelConfig.from_dict({"kind": "nbpr", "factors": 64, "item_bias": True, **HISTORY})
    rows = []
    for n_items in HISTORY_ITEMS:
        train = _random_interactions(HISTORY_USERS, n_items)
        rows.append([n_items, round(n_items / BATCH, 1), *_both_ways(pooled, SHARED, train)])
    publish("adam-items", ["items", *head], rows)


def _random_interactions(n_users: int, n_items: int) -> Interactions:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(n_users), ITEMS_EACH)
    items = rng.integers(n_items, size=len(users))
    ids = [[str(i) for i in range(n)] for n in (n_users, n_items)]
    return Interactions.from_arrays(users, items, user_ids=ids[0], item_ids=ids[1])


def _both_ways(shape: ModelConfig, training: dict[str, Any], train: Interactions) -> list[float]:
    """Milliseconds of a step on whole tables and by rows, and their ratio."""
    seconds = [_adam_step(shape, {**training, "optimizer": o}, train) for o in ("dense", "sparse")]
    dense, sparse = (round(1e3 * each, 1) for each in seconds)
    return [dense, sparse, round(sparse / dense, 2)]


def _adam_step(shape: ModelConfig, training: dict[str, Any], train: Interactions) -> float:
    """The fastest of three rounds, without the first step, which makes Adam's moments."""
    config = TrainConfig(**{"batch_size": BATCH, **training})
    model = build_model(shape, train.n_users, train.n_items)
    started = 0.0

    def timed(rows: Iterator[Rows | SharedRows]) -> Iterator[Rows | SharedRows]:
        nonlocal started
        yield next(rows)
        started = time.perf_counter()
        yield from islice(rows, ADAM_STEPS)

    best = float("inf")
    for _ in range(3):  # noise only ever adds
        epoch_of(model, train, config, timed)
        best = min(best, (time.perf_counter() - started) / ADAM_STEPS)
    return best


if __name__ == "__main__":
    run_command(main, adam=measure_adam)
