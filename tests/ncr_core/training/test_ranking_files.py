"""Several ranks find the positions of held-out items that one process finds."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ncr_core.data import Interactions, Split
from ncr_core.data.interactions import IntArray
from ncr_core.data.splits import NextItemSplit
from ncr_core.errors import CheckpointError, TrainingError
from ncr_core.evaluation.protocols import ModelRanks, full_ranks, of_random_users
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.models import ModelConfig
from ncr_core.training import rank_engine
from ncr_core.training.phase_files import MODEL, SPLIT, save_failure
from ncr_core.training.rank_engine import RankEngine
from ncr_core.training.rank_process import run_rank
from ncr_core.training.ranking_files import TABLES, RankingOrder, save_positions
from ncr_core.training.ranks import ONE_RANK, Ranks, Tables
from ncr_core.training.torchrun import TorchrunEngine
from ncr_core.training.trainer import OnProgress
from tests.cluster.process import children_of, wait_until
from tests.ncr_core.conftest import wild_model

USERS, SEED = 90, 3
NEUPR, DNCR = (ModelConfig(kind=kind, factors=3) for kind in ("neupr", "dncr"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks have more threads than this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OneOf(Ranks):
    """One of several ranks, whose own part of a sum is all that it gets."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def ranks_of_some_items(config: ModelConfig, split: Split, users: IntArray) -> VectorRanks:
    """As of the gate: vectors that are not the model's, and a model with more items."""
    rng, n_items = np.random.default_rng(0), split.train.n_items
    rows = rng.permutation(n_items + 9)[:n_items]
    model = wild_model(config, 2, n_items + 9)
    size = model.user_vectors(torch.tensor([0])).shape[1]
    vectors = torch.from_numpy(rng.normal(size=(len(users), size))).float()
    return VectorRanks(model, users, vectors, np.stack([rows, rows], axis=1)[:, 0])


def test_a_model_with_its_own_users_is_ranked_as_without_vectors(
    config: ModelConfig, split: Split
) -> None:
    model = wild_model(config, split.train.n_users, split.train.n_items)
    held_out = of_random_users(split.test, USERS)
    by_vectors = VectorRanks.as_trained(model, np.flatnonzero(split.test >= 0))
    assert by_vectors.ranks_catalogue == ModelRanks(model).ranks_catalogue
    one, other = (full_ranks(r, split, held_out, SEED) for r in (by_vectors, ModelRanks(model)))
    assert one[0].tolist() == other[0].tolist()
    assert one[1] == other[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["test", "validation", "next item", "all seen"])
def test_an_order_that_was_written_finds_the_same_positions(
    config: ModelConfig, case: str, split: Split, tmp_path: Path
) -> None:
    if case == "next item":
        split = NextItemSplit(split.train, split.validation, split.test)
    held_out = of_random_users(split.validation if case == "validation" else split.test, USERS)
    if case == "all seen":
        users = np.flatnonzero(held_out >= 0)[:1]
        train, every = split.train, np.arange(split.train.n_items)
        left = np.setdiff1d(every, split.seen_items(users[0]))
        full = Interactions.from_arrays(
            np.append(train.users, np.repeat(users, len(left))),
            np.append(train.items, left),
            user_ids=train.user_ids,
            item_ids=train.item_ids,
        )
        split = Split(full, split.validation, split.test)
    model = ranks_of_some_items(config, split, np.flatnonzero(split.test >= 0))
    expected = full_ranks(model, split, held_out, SEED)
    RankingOrder.of(model, split, held_out, SEED).save(tmp_path)
    order = RankingOrder.load(tmp_path)
    positions, items = order.positions(ONE_RANK)
    assert positions.tolist() == expected[0].tolist()
    assert items == expected[1]
    assert (positions >= 0).any()
    if case == "all seen":
        assert positions[0] == 0  # nothing else is left
    parts = [order.positions(OneOf(rank, 3)) for rank in range(3)]
    assert sum(part[0] for part in parts).tolist() == expected[0].tolist()  # type: ignore[union-attr]
    assert max(part[1] for part in parts) == expected[1]
    assert sum((part[0] != 0).any() for part in parts) == 3
    for _ in range(2):  # ranks that make the file of tables, and that find it
        shared = RankingOrder.load(tmp_path).sharing_tables(tmp_path)
        assert shared.positions(ONE_RANK)[0].tolist() == expected[0].tolist()
        assert len([*(tmp_path / TABLES).iterdir()]) == 1


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """A process group with this process alone."""
    store = dist.FileStore(str(folder / "meeting"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("file", [MODEL, SPLIT])
@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_file_is_named(file: str, gone: bool, split: Split, tmp_path: Path) -> None:
    held_out = of_random_users(split.test, USERS)
    users = np.flatnonzero(held_out >= 0)
    RankingOrder.of(ranks_of_some_items(NEUPR, split, users), split, held_out, SEED).save(tmp_path)
    path = tmp_path / file
    if gone:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    message = f"cannot read {re.escape(str(path))}"
    with group_of_one(tmp_path), pytest.raises(TrainingError, match=message):
        run_rank(tmp_path, "replicated", 0, print)


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "has too little disk"),
        (CheckpointError("tables.safetensors is damaged"), "cannot write its tables: tables"),
    ],
)
def test_a_rank_that_cannot_write_its_tables_says_why(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    held_out = of_random_users(split.test, USERS)
    model = ranks_of_some_items(DNCR, split, np.flatnonzero(held_out >= 0))
    RankingOrder.of(model, split, held_out, SEED).save(tmp_path)
    monkeypatch.setattr(SharedTables, "margins", fail)
    with group_of_one(tmp_path), pytest.raises(TrainingError, match=f"^rank 0 on .* {words}"):
        run_rank(tmp_path, "sharded", 0, print)


class EngineOfThisProcess(RankEngine):
    """An engine whose rank is this process; ``end`` replaces its work."""

    def __init__(self, ranks: int, tables: Tables, folder: Path) -> None:
        super().__init__(ranks, tables, folder)
        self.runs, self.threads = 0, ranks
        self.problem: str | None = None
        self.end: Callable[[Path], str | None] | None = None

    def _threads(self) -> int:
        return self.threads

    def _connect(self) -> None:
        if self.problem is not None:
            raise TrainingError(self.problem)

    def _run(self, folder: Path, on_progress: OnProgress | None) -> str | None:
        self.runs += 1
        if self.end is not None:
            return self.end(folder)
        order = RankingOrder.load(folder)
        if self.tables == "sharded":
            order = order.sharing_tables(folder)
        save_positions(folder, *order.positions(ONE_RANK))
        return None


@pytest.mark.parametrize(
    "kind, cells, at_least, tables, threads, by_ranks",
    [
        ("neupr", "MIN_COMPARISONS", 1.0, "replicated", 2, True),
        ("neupr", "MIN_COMPARISONS", 1.01, "replicated", 2, False),
        ("nbpr", "MIN_PRODUCTS", 1.0, "replicated", 2, True),
        ("nbpr", "MIN_PRODUCTS", 1.08, "replicated", 2, False),
        ("neupr", "MIN_COMPARISONS", 1.0, "replicated", 1, False),  # as many as this process
        ("dncr", "MIN_COMPARISONS", 1.0, "sharded", 2, True),
    ],
)
def test_ranks_start_only_for_long_work_and_with_more_threads(
    kind: str,
    cells: str,
    at_least: float,
    tables: Tables,
    threads: int,
    by_ranks: bool,
    split: Split,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out = of_random_users(split.test, USERS)
    config = ModelConfig.from_dict({"kind": kind, "factors": 3})
    model = ranks_of_some_items(config, split, np.flatnonzero(split.test >= 0))
    # A product is computed for all items of the model.
    items = model.model.n_items if kind == "nbpr" else split.train.n_items
    monkeypatch.setattr(rank_engine, cells, at_least * USERS * items)
    engine = EngineOfThisProcess(2, tables, tmp_path)
    engine.threads = threads
    expected = full_ranks(model, split, held_out, SEED)
    found = engine.full_ranks(model, split, held_out, SEED)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1] == expected[1]
    assert engine.runs == by_ranks
    assert [*tmp_path.iterdir()] == []


def test_one_process_ranks_for_fewer_users_than_ranks_and_without_vectors(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_engine, "MIN_COMPARISONS", 1)
    engine = EngineOfThisProcess(2, "replicated", tmp_path)
    model = ranks_of_some_items(NEUPR, split, np.flatnonzero(split.test >= 0))
    own = ModelRanks(wild_model(NEUPR, split.train.n_users, split.train.n_items))
    one = of_random_users(split.test, 1)
    for ranks, held_out in ((model, one), (own, split.test)):
        found = engine.full_ranks(ranks, split, held_out, SEED)
        assert found[0].tolist() == full_ranks(ranks, split, held_out, SEED)[0].tolist()
    assert engine.runs == 0
    engine.full_ranks(model, split, of_random_users(split.test, 2), SEED)
    assert engine.runs == 1


def test_this_process_ranks_if_the_ranks_are_lost(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_engine, "MIN_COMPARISONS", 1)
    model = ranks_of_some_items(NEUPR, split, np.flatnonzero(split.test >= 0))
    engine = EngineOfThisProcess(2, "replicated", tmp_path)
    expected = full_ranks(model, split, split.test, SEED)
    for end, problem, words in [
        (lambda folder: "rank 1 was lost", None, "rank 1 was lost"),
        (lambda folder: None, None, "ended without a result"),
        (lambda folder: save_failure(folder, "rank 0 is old"), None, "rank 0 is old"),
        (None, "the cluster does not answer", "the cluster does not answer"),
    ]:
        engine.end, engine.problem = end, problem
        with pytest.warns(UserWarning, match=f"one process ranks.*{words}"):
            found = engine.full_ranks(model, split, split.test, SEED)
        assert found[0].tolist() == expected[0].tolist()
        assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("tables, config", [("replicated", NEUPR), ("sharded", DNCR)])
def test_torchrun_finds_the_positions_after_a_rank_was_killed(
    split: Split,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: Tables,
    config: ModelConfig,
) -> None:
    monkeypatch.setattr(rank_engine, "MIN_COMPARISONS", 1)
    model = ranks_of_some_items(config, split, np.flatnonzero(split.test >= 0))
    engine = TorchrunEngine(2, tables, tmp_path)
    lost: list[int] = []

    def kill() -> None:
        def ranks() -> list[int]:
            return [rank for agent in children_of(os.getpid()) for rank in children_of(agent)]

        wait_until(lambda: len(ranks()) == 2, 60, "start of the ranks")
        lost.append(ranks()[-1])
        os.kill(lost[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with monkeypatch.context() as patch:
        patch.setattr(rank_engine, "full_ranks", None)  # of this process
        positions, items = engine.full_ranks(model, split, split.test, SEED)
    killer.join()
    assert lost
    expected = full_ranks(model, split, split.test, SEED)
    assert positions.tolist() == expected[0].tolist()
    assert items == expected[1]
    assert [*tmp_path.iterdir()] == []
