"""What the child process reads: the served model, and its evaluation snapshot."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from app.core.settings import Settings
from app.registry.checkpoint_store import StoreUnavailable
from app.registry.service import ModelRegistry, open_checkpoint_store
from app.training.reader import Retry, TrainingReader
from app.wiring import Services, build_services
from tests.app.conftest import add_small_data, publish_model, run_job_here
from tests.app.registry.conftest import ObjectStore

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class CountedLoads:
    """Counts the checkpoints that the registry loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: list[str] = []
        load = ModelRegistry.load_measured

        async def counted(registry: ModelRegistry, row: Any, device: str) -> Any:
            self.versions.append(row.version)
            return await load(registry, row, device)

        monkeypatch.setattr(ModelRegistry, "load_measured", counted)


async def test_the_served_model_is_loaded_anew_only_when_another_is_served(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = CountedLoads(monkeypatch)
    reader = TrainingReader(settings, open_checkpoint_store(settings), "cpu", Retry(0.0))
    assert await asyncio.to_thread(reader.serving_model) is None
    await add_small_data(services)
    first = await publish_model(services)
    model = await asyncio.to_thread(reader.serving_model)
    assert model is not None
    assert model.version == first
    assert await asyncio.to_thread(reader.serving_model) is model
    second = await publish_model(services, seed=1)
    model = await asyncio.to_thread(reader.serving_model)
    assert model is not None
    assert model.version == second
    assert loads.versions == [first, second]


async def test_a_warm_start_loads_the_served_checkpoint_once(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_small_data(services)
    first = await publish_model(services)
    loads = CountedLoads(monkeypatch)
    job = await run_job_here(services, settings, start="warm")
    assert (job.metrics or {})["start"] == {"from": "warm", "version": first}
    assert (job.metrics or {})["gate"]["incumbent"] == first
    assert loads.versions == [first]


async def test_a_damaged_evaluation_snapshot_is_fetched_again_from_the_store(
    settings: Settings, objects: ObjectStore
) -> None:
    services = await build_services(settings.model_copy(update={"checkpoint_store": objects.url}))
    try:
        await add_small_data(services)
        version = await publish_model(services)
        await services.models.upload(version)
        row = await services.models.get(version)
        copy = services.models.folder(version) / "evaluated.safetensors"
        copy.write_bytes(b"rotten")
        _, evaluated = await services.models.load_measured(row, "cpu")
        assert evaluated is not None
        copy.unlink()
        _, evaluated = await services.models.load_measured(row, "cpu")
        assert evaluated is not None
        copy.write_bytes(b"rotten")
        objects.stop()
        with pytest.raises(StoreUnavailable):
            await services.models.load_measured(row, "cpu")
    finally:
        await services.close()


async def test_a_damaged_evaluation_snapshot_without_another_copy_is_left_out(
    services: Services,
) -> None:
    await add_small_data(services)
    version = await publish_model(services)
    row = await services.models.get(version)
    folder = services.models.folder(version)
    (folder / "evaluated.safetensors").write_bytes(b"rotten")
    checkpoint, evaluated = await services.models.load_measured(row, "cpu")
    assert len(checkpoint.user_ids) == 60
    assert evaluated is None
    shutil.rmtree(folder)
    with pytest.raises(Exception, match="cannot be read"):
        await services.models.load_measured(row, "cpu")
