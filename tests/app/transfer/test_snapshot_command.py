"""`ncr snapshot`, and a training on what it has written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import typer
from typer.testing import CliRunner

from app.cli import train
from app.core.settings import Settings
from app.transfer.snapshot import write_snapshot
from app.wiring import Services
from ncr_core.checkpoint import load_checkpoint
from ncr_core.data.dataset import load_interactions
from ncr_core.data.snapshot import MANIFEST, Snapshot, part_name
from ncr_core.errors import DataError, StoreUnavailable
from tests.app.conftest import add_small_data, interactions_of

if TYPE_CHECKING:
    from tests.app.registry.conftest import ObjectStore


@pytest.mark.anyio
async def test_a_snapshot_in_a_folder_is_a_data_set(
    services: Services, settings: Settings, tmp_path: Path
) -> None:
    await add_small_data(services)
    folder = tmp_path / "new" / "snapshot"
    manifest = await asyncio.to_thread(write_snapshot, settings, str(folder), parts=3)
    loaded = load_interactions(folder).interactions
    whole = interactions_of(services)
    back = loaded.reindex(whole.user_ids, whole.item_ids)
    assert back.items.tolist() == whole.items.tolist()
    assert manifest.n_interactions == whole.nnz
    with pytest.raises(DataError, match="exists already"):
        await asyncio.to_thread(write_snapshot, settings, str(folder))


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_snapshot_in_object_storage_is_verified_and_never_overwritten(
    services: Services, settings: Settings, objects: ObjectStore
) -> None:
    await add_small_data(services)
    address = f"{objects.url}/snapshots/today"
    manifest = await asyncio.to_thread(write_snapshot, settings, address, parts=3)
    snapshot = Snapshot.open(address)
    assert snapshot.manifest == manifest
    assert snapshot.read([1]).nnz == manifest.parts[1].interactions
    with pytest.raises(DataError, match="exists already"):
        await asyncio.to_thread(write_snapshot, settings, address)
    assert not list(settings.data_dir.glob(".snapshot-*"))

    objects.flip(f"snapshots/today/{part_name(1)}")
    with pytest.raises(DataError, match=r"part-00001\.parquet is damaged"):
        snapshot.read([1])
    objects.files.rm(objects.path(f"snapshots/today/{part_name(2)}"))
    with pytest.raises(DataError, match=r"part-00002\.parquet of \S+ is missing$"):
        snapshot.read([2])
    objects.files.rm(objects.path(f"snapshots/today/{MANIFEST}"))
    with pytest.raises(DataError, match=r"manifest\.json of"):
        Snapshot.open(address)
    objects.stop()
    with pytest.raises(StoreUnavailable, match=r"cannot be read: the store cannot be reached$"):
        snapshot.read([0])


@pytest.mark.slow
@pytest.mark.anyio
async def test_two_processes_train_on_a_snapshot_as_one_does(
    services: Services, settings: Settings, tmp_path: Path
) -> None:
    await add_small_data(services)
    folder = tmp_path / "snapshot"
    await asyncio.to_thread(write_snapshot, settings, str(folder), parts=3)
    small_steps = ("--learning-rate", "1e-5", "--dropout", "0", "--epochs", "2")
    models, cli = {}, typer.Typer()
    train.register(cli)
    for ranks in (1, 2):
        out = tmp_path / f"checkpoint-{ranks}"
        command = ["train", "--data", str(folder), "--out", str(out), "--recipe", "history"]
        command += [*small_steps, "--device", "cpu", "--ranks", str(ranks)]
        result = await asyncio.to_thread(CliRunner().invoke, cli, command)
        assert result.exit_code == 0, result.output
        models[ranks] = load_checkpoint(out).model.state_dict()
    for name, expected in models[1].items():
        assert torch.allclose(models[2][name], expected, rtol=0.0, atol=1e-6), name
    assert not list(tmp_path.glob("ncr-phase*"))
