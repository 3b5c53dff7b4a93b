"""Mapped models and tables: the same lists bit for bit, and no file that is cut off."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from ncr_core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ncr_core.errors import CheckpointError
from ncr_core.fold_in import Evidence
from ncr_core.inference.engine import InferenceEngine, RankedItem
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.models import ModelConfig
from ncr_core.ranking import candidates, table_blocks
from ncr_core.tensor_files import TensorLayout
from tests.ncr_core.conftest import CONFIGS, config_name, wild_model

N_USERS, N_ITEMS = 6, 40


def checkpoint_in(folder: Path, config: ModelConfig) -> Path:
    save_checkpoint(
        folder,
        wild_model(config, N_USERS, N_ITEMS),
        user_ids=[f"u{row}" for row in range(N_USERS)],
        item_ids=[f"i{row}" for row in range(N_ITEMS)],
        item_counts=np.arange(N_ITEMS)[::-1].copy(),
    )
    return folder


def lists_of(engine: InferenceEngine) -> list[list[RankedItem]]:
    items = ItemFilter(np.ones(N_ITEMS, dtype=np.bool_), np.array([3, 5]))
    users = [UserState(row) for row in range(N_USERS)] + [UserState(0, Evidence(np.array([1, 9])))]
    requests = [RankRequest(user, 12, items, diversity=d) for user in users for d in (0.0, 0.5)]
    return engine.rank(requests)


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with parameters that are copies."""
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.data = parameter.data.clone()
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_lists_of_mapped_tables_are_those_of_memory_bit_for_bit(
    tmp_path: Path, config: ModelConfig
) -> None:
    path = checkpoint_in(tmp_path / "checkpoint", config)
    expected = lists_of(InferenceEngine(in_memory(load_checkpoint(path)), 20))
    shared = SharedTables(tmp_path / "tables")
    for _ in range(2):  # written, and found
        engine = InferenceEngine(load_checkpoint(path), 20, shared=shared, shared_key="0" * 64)
        assert lists_of(engine) == expected
    assert len(list((tmp_path / "tables").iterdir())) == 1


@pytest.mark.parametrize("config", CONFIGS, ids=config_name)
def test_tables_that_are_computed_in_blocks_give_the_same_lists(
    tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_in(tmp_path / "checkpoint", config)
    expected = lists_of(InferenceEngine(load_checkpoint(path), 20))
    monkeypatch.setattr(table_blocks, "BLOCK_ITEMS", 7)
    shared = SharedTables(tmp_path / "tables")
    engine = InferenceEngine(load_checkpoint(path), 20, shared=shared, shared_key="0" * 64)
    for found, own in zip(lists_of(engine), expected, strict=True):
        assert [item.row for item in found] == [item.row for item in own]
        # A matrix product may round the same row differently in a block of another height.
        assert [item.score for item in found] == pytest.approx([item.score for item in own])


@pytest.mark.slow
def test_a_file_of_tables_that_is_cut_off_is_made_again(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(checkpoint_in(tmp_path / "c", CONFIGS[0]))
    shared = SharedTables(tmp_path / "tables")
    expected = lists_of(InferenceEngine(checkpoint, 20))
    InferenceEngine(checkpoint, 20, shared=shared, shared_key="k")
    file = shared.path("k", "tables.safetensors")
    size = file.stat().st_size
    for damaged in (size - 1, 100, 0):
        os.truncate(file, damaged)
        engine = InferenceEngine(checkpoint, 20, shared=shared, shared_key="k")
        assert lists_of(engine) == expected
        assert file.stat().st_size == size
        del engine  # what is mapped must not be cut off
        gc.collect()


def test_a_damaged_file_of_tables_keeps_its_name_until_a_whole_one_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server may have written a whole file since, and is about to map it."""
    model = load_checkpoint(checkpoint_in(tmp_path / "c", CONFIGS[0])).model
    shared = SharedTables(tmp_path / "tables")
    file = shared.path("k", "tables.safetensors")
    shared.margins(model, "k")
    os.truncate(file, 100)
    begin, there = TensorLayout.begin, []

    def watched(self: TensorLayout, written: IO[bytes]) -> None:
        there.append(file.exists())
        begin(self, written)

    monkeypatch.setattr(TensorLayout, "begin", watched)
    shared.margins(model, "k")
    assert there == [True]
    assert file.stat().st_size > 100


def test_tables_that_nobody_uses_are_removed_after_a_day(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(checkpoint_in(tmp_path / "c", CONFIGS[0]))
    shared = SharedTables(tmp_path)
    for key in ("old", "new"):
        shared.margins(checkpoint.model, key)
    os.utime(shared.path("old", "tables.safetensors"), (0, 0))
    shared.margins(checkpoint.model, "newest")
    assert [shared.path(key, "tables.safetensors").exists() for key in ("old", "new")] == [
        False,
        True,
    ]


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_mapped_checkpoint_that_is_cut_off_is_refused_when_it_is_loaded(
    tmp_path: Path, length: int
) -> None:
    path = checkpoint_in(tmp_path / "c", CONFIGS[0])
    weights = path / "model.safetensors"
    os.truncate(weights, length if length >= 0 else weights.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(path)


def test_what_is_written_to_a_mapped_parameter_is_not_in_the_file(tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path / "c", CONFIGS[0])
    weights = path / "model.safetensors"
    before = weights.read_bytes()
    model = load_checkpoint(path).model
    with torch.no_grad():
        model.items.weight.fill_(7.0)
    assert weights.read_bytes() == before
    assert not bool((load_checkpoint(path).model.items.weight == 7.0).any())


@pytest.mark.slow
def test_a_shared_index_finds_what_one_in_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(candidates, "MIN_FAISS_ITEMS", N_ITEMS)
    monkeypatch.setattr(candidates, "MAX_PROBED", 1.0)
    config = ModelConfig(kind="nbpr", factors=4, item_bias=True)
    checkpoint = load_checkpoint(checkpoint_in(tmp_path / "c", config))
    expected = lists_of(InferenceEngine(checkpoint, 20))
    shared = SharedTables(tmp_path / "tables")
    for length in (None, 50, 0):
        if length is not None:
            (file,) = (tmp_path / "tables").glob("*.faiss.*")
            os.truncate(file, length)
        engine = InferenceEngine(checkpoint, 20, shared=shared, shared_key="k")
        assert lists_of(engine) == expected
        del engine  # what is mapped must not be cut off
        gc.collect()
    (file,) = (tmp_path / "tables").glob("*.faiss.*")
    assert file.suffix == f".{file.stat().st_size}"
