"""Matrices whose arrays are in files are those in memory, whatever a copy takes at a time."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ncr_core.data import Interactions, array_storage, compact, leave_latest_out
from ncr_core.data import interactions as matrix
from ncr_core.data.array_storage import IN_MEMORY, FileStorage, storing_tables, table_storage
from ncr_core.data.snapshot import concatenated, of_users
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.models.user_embeddings import PooledUsers
from ncr_core.ranking import table_blocks
from ncr_core.ranking.ranker import ExactRanker
from ncr_core.recipes import recipe
from ncr_core.training import gaps, next_item, train_model, warm_start
from ncr_core.training.pretraining import evaluation_snapshot, learn_everything
from ncr_core.training.warm_start import evaluated_starting_point, train_warm
from tests.ncr_core.conftest import CONFIGS, config_name, wild_model

N_ITEMS = 7
LISTS = st.lists(st.lists(st.integers(0, N_ITEMS - 1), unique=True), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_storage, "MIN_BYTES", 0)


def matrix_of(lists: list[list[int]], weighted: bool) -> Interactions:
    items = np.array([item for own in lists for item in own], dtype=np.int64)
    indptr = np.cumsum([0, *(len(own) for own in lists)]).astype(np.int64)
    weights = np.arange(1, len(items) + 1, dtype=np.float32) if weighted else None
    users, names = (
        [f"{kind}{n}" for n in range(k)] for kind, k in (("u", len(lists)), ("i", N_ITEMS))
    )
    times = 10.0 * np.arange(len(items))
    return Interactions(indptr, items, users, names, weights, None, times)


def rows_of(made: Interactions) -> list[list[tuple[float, ...]]]:
    weights = np.ones(made.nnz) if made.weights is None else made.weights
    assert made.times is not None
    rows = list(zip(made.items.tolist(), weights.tolist(), made.times.tolist(), strict=True))
    return [rows[a:b] for a, b in zip(made.indptr[:-1], made.indptr[1:], strict=True)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lists=LISTS,
    weighted=st.booleans(),
    block=st.integers(1, 9),
    in_files=st.booleans(),
    data=st.data(),
)
def test_copies_in_blocks_are_those_row_by_row(
    lists: list[list[int]],
    weighted: bool,
    block: int,
    in_files: bool,
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    every = matrix_of(lists, weighted)
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=every.nnz, max_size=every.nnz)), bool
    )
    chosen = st.lists(st.integers(0, len(lists) - 1), unique=True)
    users = np.array(sorted(data.draw(chosen)), dtype=np.int64)
    literal = rows_of(every)
    kept = iter(mask.tolist())
    selected = [[row for row in own if next(kept)] for own in literal]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "BLOCK", block)
        every = replace(every, storage=FileStorage(tmp_path) if in_files else IN_MEMORY)
        assert rows_of(every.select(mask)) == selected
        assert rows_of(every.of_rows(users)) == [literal[user] for user in users]
        used = sorted({int(item) for item in every.items[mask]})
        assert rows_of(compact(every.select(mask))) == [
            [(used.index(int(item)), *rest) for item, *rest in own] for own in selected if own
        ]
        parts = [of_users(every, np.arange(start, len(lists), 2)) for start in (0, 1)]
        joined = concatenated(parts, every.nnz + 3, every.item_ids, every.storage)
        assert rows_of(joined) == [*literal[::2], *literal[1::2]]
        if any(len(own) > 2 for own in lists):
            held = leave_latest_out(every)
            assert rows_of(held.train) == [own[:-2] if len(own) > 2 else own for own in literal]
            assert held.train.storage is every.storage
    assert list(tmp_path.iterdir()) == []


def is_in_file(address: int, folder: Path) -> bool:
    """Whether a file of a folder backs the memory at an address (Linux)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            return str(folder) in line
    return False


def test_arrays_in_files_can_be_written_and_shared_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FileStorage(tmp_path).zeros((3, 2), np.float32)
    made[:] = [[1, 2], [3, 4], [5, 6]]
    tensor = torch.from_numpy(made)
    tensor[1] = 9.0
    if sys.platform == "linux":
        assert is_in_file(tensor.data_ptr(), tmp_path)
    assert made.tolist() == [[1, 2], [9, 9], [5, 6]]
    assert FileStorage(tmp_path).zeros(0, np.int64).tolist() == []
    monkeypatch.setattr(array_storage, "MIN_BYTES", 25)
    few = FileStorage(tmp_path).zeros((3, 2), np.float32)
    assert not few.any()
    assert few.base is None


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no room")
def test_a_disk_without_room_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FileStorage(tmp_path).zeros(10, np.int64)


def test_room_is_written_where_it_cannot_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    made = FileStorage(tmp_path).zeros(2**22, np.int64)
    assert not made.any()
    made[-1] = 7
    assert made[-1] == 7


@pytest.mark.parametrize("name", ["next-item-nbpr", "next-item", "als-nbpr"])
def test_a_training_on_arrays_in_files_gives_the_same_model(
    name: str, told: Interactions, tmp_path: Path
) -> None:
    epochs = 2 if name.endswith("nbpr") else 0
    chosen = recipe(name).with_(factors=4, epochs=epochs, dropout=0.0, device="cpu")
    models = []
    for storage in (IN_MEMORY, FileStorage(tmp_path)):
        every = replace(told, storage=storage)
        split = leave_latest_out(every)
        trained = train_model(chosen.model, chosen.training, split)
        models.append(learn_everything(chosen, trained, split, every))
    in_memory, in_files = (model.state_dict() for model in models)
    assert in_memory.keys() == in_files.keys()
    assert all(value.equal(in_files[key]) for key, value in in_memory.items())
    part = models[1].user_parts()[0]
    if isinstance(part, PooledUsers):
        assert part.weight.any()
        if sys.platform == "linux":
            assert is_in_file(part.weight.data_ptr(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def is_mapped(value: torch.Tensor, folder: Path) -> bool:
    return sys.platform != "linux" or is_in_file(value.data_ptr(), folder)


def item_table(model: PairwiseRanker) -> torch.Tensor:
    tables = [model.get_parameter(name) for name in model.item_tables]
    return next(table for table in tables if table.ndim == 2)


STORED = [
    "next-item-nbpr", "next-item", "next-item-attention", "next-item-dncr", "als-nbpr", "dncr",
    "default",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_a_training_with_tables_in_files_gives_the_same_model(
    name: str, told: Interactions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_item, "MAX_DENSE_ITEMS", 3)  # as of many items
    hours = np.where(np.arange(told.nnz) % 3 == 0, 30.0, 2.0)  # breaks of both classes
    told = replace(told, times=3600.0 * hours.cumsum())
    chosen = recipe(name).with_(factors=4, epochs=int(name != "next-item"), device="cpu")
    split = leave_latest_out(told)
    models, figures = [], []
    for storage in (IN_MEMORY, FileStorage(tmp_path)):
        next_item._known.clear()  # or the second training would have the factors of the first
        if storage is not IN_MEMORY:
            monkeypatch.setattr(gaps, "BLOCK_ITEMS", 7)
            monkeypatch.setattr(table_blocks, "BLOCK_ITEMS", 7)
            monkeypatch.setattr(next_item, "CELLS_AT_ONCE", 99)
        with storing_tables(storage):
            assert table_storage() is storage
            trained = train_model(chosen.model, chosen.training, split)
            figures.append([vars(phase) | {"seconds": 0} for phase in trained.history])
            models.append(learn_everything(chosen, trained, split, told))
        assert table_storage() is IN_MEMORY
    assert figures[0] == figures[1]
    in_memory, in_files = (model.state_dict() for model in models)
    assert in_memory.keys() == in_files.keys()
    assert all(value.equal(in_files[key]) for key, value in in_memory.items())
    assert is_mapped(item_table(models[1]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_lists_of_tables_in_files_are_those_of_tables_in_memory(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_blocks, "BLOCK_ITEMS", 7)
    model = wild_model(config, 6, 20).requires_grad_(False)
    users, candidates = model.user_vectors(torch.arange(6)), torch.arange(20).expand(6, 20)
    expected = ExactRanker(model).rank(users, candidates, 10)
    with storing_tables(FileStorage(tmp_path)):
        ranker = ExactRanker(model)
    assert ranker.rank(users, candidates, 10).equal(expected)
    whole = ExactRanker(model).margins
    for mine, theirs in (
        (ranker.margins.double, whole.double),
        (ranker.margins.single, whole.single),
    ):
        for name in ("linear.items", "linear.bias", "tower.first", "tower.second", "tower.items"):
            part, _, leaf = name.partition(".")
            one, other = (getattr(getattr(x, part), leaf, None) for x in (mine, theirs))
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.allclose(other, rtol=1e-12 if one.dtype == torch.float64 else 1e-6)
                assert not one.numel() or is_mapped(one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["next-item-nbpr", "default"])
def test_a_warm_start_with_tables_in_files_gives_the_same_model(
    name: str, told: Interactions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(name).with_(factors=4, epochs=1, device="cpu")
    split = leave_latest_out(told)
    trained = train_model(chosen.model, chosen.training, split)
    rows = np.arange(0, trained.model.n_users, 2)
    held_out = np.stack([split.test[rows], split.validation[rows]], axis=1)
    served = learn_everything(chosen, trained, split, told)
    models = []
    for storage in (IN_MEMORY, FileStorage(tmp_path)):
        if storage is not IN_MEMORY:
            monkeypatch.setattr(warm_start, "ROWS_AT_ONCE", 5)
        with storing_tables(storage):
            evaluated = evaluation_snapshot(trained.model, rows, held_out)
            base = evaluated_starting_point(served, evaluated, told.user_ids, told.item_ids)
            models.append(train_warm(base, chosen.training, split).model)
    in_memory, in_files = (model.state_dict() for model in models)
    assert all(value.equal(in_files[key]) for key, value in in_memory.items())
    assert is_mapped(item_table(models[1]), tmp_path)
