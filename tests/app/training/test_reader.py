"""What the child process reads: the served model; and whether a training fits in memory."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.core.settings import Settings, load_settings
from app.jobs.schemas import TrainParams
from app.registry.service import ModelRegistry, open_checkpoint_store
from app.training import reader
from app.training.gate import IncumbentComparison, ServingModel
from app.training.reader import Retry, TrainingReader
from app.wiring import Services, build_services
from ncr_core.errors import StoreUnavailable, TrainingError
from tests.app.conftest import add_small_data, publish_model, run_job_here
from tests.app.registry.conftest import ObjectStore


class CountedLoads:
    """Counts the checkpoints that the registry loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: list[str] = []
        load = ModelRegistry.load_measured

        async def counted(registry: ModelRegistry, row: Any, device: str) -> Any:
            self.versions.append(row.version)
            return await load(registry, row, device)

        monkeypatch.setattr(ModelRegistry, "load_measured", counted)


@pytest.mark.anyio
@pytest.mark.slow
async def test_the_served_model_is_loaded_anew_only_when_another_is_served(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = CountedLoads(monkeypatch)
    reads = TrainingReader(settings, open_checkpoint_store(settings), "cpu", Retry(0.0))
    await add_small_data(services)
    interactions, snapshot = await asyncio.to_thread(reads.read_events, TrainParams())
    everyone = np.ones(interactions.n_users, dtype=np.bool_)
    comparison = IncumbentComparison(reads, snapshot, 0.05)
    comparison.read_users(interactions, everyone)

    def load() -> ServingModel | None:
        loaded = comparison.load(interactions, everyone)
        return None if loaded is None else loaded[0]

    assert await asyncio.to_thread(load) is None
    first = await publish_model(services)
    model = await asyncio.to_thread(load)
    assert model is not None
    assert model.version == first
    assert await asyncio.to_thread(load) is model
    second = await publish_model(services, seed=1)
    model = await asyncio.to_thread(load)
    assert model is not None
    assert model.version == second
    assert loads.versions == [first, second]


@pytest.mark.anyio
@pytest.mark.slow
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


@pytest.mark.anyio
@pytest.mark.slow
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


@pytest.mark.anyio
@pytest.mark.slow
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


SIZES = (5_000_000, 200_000, 20_000)
PARAMS = TrainParams(recipe="next-item")


def container(folder: Path, limit: str, used: int, of_files: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {of_files}\nactive_file 0\n")


@pytest.fixture
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(reader, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(reader, "_CGROUP", tmp_path)
    monkeypatch.setattr(reader, "_taken_bytes", lambda: 0)


@pytest.mark.usefixtures("_machine")
def test_files_that_a_container_has_read_leave_its_memory_free(tmp_path: Path) -> None:
    container(tmp_path, str(4 * 2**30), 4 * 2**30 - 2**20, 3 * 2**30)
    assert reader.available_bytes() == 3 * 2**30 + 2**20
    container(tmp_path, "max", 2**30, 0)
    assert reader.available_bytes() == 8 * 2**30


@pytest.mark.usefixtures("_machine")
def test_a_limit_counts_the_whole_estimate_and_free_memory_what_trainings_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = reader.training_bytes(PARAMS, *SIZES)
    tight = int(0.8 * needed)
    with pytest.raises(TrainingError, match="GiB are allowed by NCR_TRAIN_MEMORY_BYTES"):
        reader.check_memory(PARAMS, SIZES, tight)
    reader.check_memory(PARAMS, SIZES, needed)
    container(tmp_path, str(tight), 0, 0)
    reader.check_memory(PARAMS, SIZES, None)
    container(tmp_path, str(needed // 2), 0, 0)
    with pytest.raises(TrainingError, match="GiB are free"):
        reader.check_memory(PARAMS, SIZES, None)
    monkeypatch.setattr(reader, "_taken_bytes", lambda: needed // 3)
    reader.check_memory(PARAMS, SIZES, None)


def test_a_start_beside_trained_factors_counts_once() -> None:
    params = TrainParams(recipe="next-item-nbpr")
    ranks = reader.RanksHere(4, elsewhere=True)

    def needs(events: int, items: int, processes: reader.RanksHere = reader.ALONE) -> int:
        return reader.training_bytes(params, events, 6_000, items, processes)

    # 8,000 items have 1,024 factors of the start, and one more item leaves too few of them.
    tables = 2 * 4 * 1_024 * 8_000
    difference = needs(2_000_000, 8_000) - needs(2_000_000, 8_001)
    assert reader.START_COPIES * tables < difference < (reader.START_COPIES + 8) * tables
    # The ranks train the other factors alone.
    in_ranks = needs(2_000_000, 8_000, ranks) - needs(2_000_000, 8_001, ranks)
    assert abs(in_ranks - difference) < 0.1 * difference
    # A million events may be few interactions, which afford more factors.
    assert needs(1_200_000, 20_000) > needs(1_200_001, 20_000)


TORCHRUN = {"NCR_TRAIN_ENGINE": "torchrun", "NCR_TRAIN_RANKS": "4"}


@pytest.mark.parametrize(
    "recipe, env, per_event",
    [
        ("next-item-nbpr", {}, reader.EVENT_BYTES),
        # The ranks have a part each, and the job's process has its matrix in files.
        ("next-item-nbpr", TORCHRUN, reader.JOB_EVENT_BYTES + reader.RANK_EVENT_BYTES),
        ("next-item-nbpr", TORCHRUN | {"NCR_TRAIN_TABLES": "sharded"},
         reader.JOB_EVENT_BYTES + 4 * reader.RANK_EVENT_BYTES),
        # These ranks read everything, and the job's process learns the held-out items.
        ("als-nbpr", TORCHRUN, reader.EVENT_BYTES + 4 * reader.RANK_EVENT_BYTES),
        # The tower has negatives of its own.
        ("next-item-neupr", TORCHRUN, reader.JOB_EVENT_BYTES + 4 * reader.RANK_EVENT_BYTES),
        ("auto", TORCHRUN, reader.EVENT_BYTES + 4 * reader.RANK_EVENT_BYTES),
        ("next-item-nbpr", {"NCR_TRAIN_ENGINE": "ray"},
         reader.JOB_EVENT_BYTES + reader.RANK_EVENT_BYTES),
        ("next-item-nbpr", {"NCR_TRAIN_ENGINE": "ray", "NCR_RAY_ADDRESS": "10.0.0.1:6379",
                            "NCR_TRAIN_FOLDER": "/shared"}, reader.JOB_EVENT_BYTES),
    ],
)  # fmt: skip
def test_an_event_counts_where_it_is_held(
    recipe: str, env: dict[str, str], per_event: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ranks = reader.RanksHere.of(load_settings())
    params = TrainParams(recipe=recipe)
    # Above the rows of the closed form, and where `auto` has the same factors.
    few, many = (
        reader.training_bytes(params, n, 1_000, 10_000, ranks) for n in (3 * 10**9, 4 * 10**9)
    )
    assert many - few == per_event * 10**9


def test_sharded_tables_take_the_disk_of_the_job_and_the_memory_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, users, items = TrainParams(recipe="next-item-nbpr", factors=64), 1_000, 10**8
    tables = 2 * 4 * 64 * items
    sizes = (0, users, items)

    def needs(*processes: Any, **fields: Any) -> int:
        return reader.training_bytes(params, *sizes, reader.RanksHere(*processes, **fields))

    whole = needs(4, False, True)
    assert whole > 5 * reader.TABLE_COPIES * tables  # of the job and of each rank
    here = needs(4, True, True)
    assert reader.TABLE_COPIES * tables < here < 1.2 * reader.TABLE_COPIES * tables
    elsewhere = needs(sharded=True, elsewhere=True)  # the ids of the items, above all
    assert elsewhere < reader.BASE_BYTES + 1.1 * reader.ROW_BYTES * items < tables
    # The model, and blocks of one table with 32 more columns.
    files = reader.FILE_MODELS_OF_RANKS + reader.RANK_FILE_MODELS
    copies = files + reader.SOLVED_BLOCKS / 2 * (64 + 32) / 64
    room = reader.FILE_ROW_BYTES * (users + items) + int((copies + 1) * tables)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**60, free=room))
    reader.check_disk(params, tmp_path, sizes, tmp_path / "ranks", sharded=True)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=2**60, free=room - 2 * tables)
    )
    reader.check_disk(params, tmp_path, sizes)
    reader.check_disk(params, tmp_path, sizes, tmp_path / "ranks")
    with pytest.raises(TrainingError, match="100,000,000 items, and"):
        reader.check_disk(params, tmp_path, sizes, tmp_path / "ranks", sharded=True)
    # Replicated tables are in the epochs of the ranks too.
    room = reader.FILE_ROW_BYTES * (users + items) + int((reader.RANK_FILE_MODELS - 0.1) * tables)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**60, free=room))
    reader.check_disk(params, tmp_path, sizes)
    with pytest.raises(TrainingError, match="100,000,000 items, and"):
        reader.check_disk(params, tmp_path, sizes, tmp_path / "ranks")


def test_the_ranks_have_a_disk_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (Path("/dev/shm"), Path(__file__).parent)  # nothing is written there
    other = next((p for p in others if p.exists() and _device(p) != _device(tmp_path)), None)
    if other is None:
        pytest.skip("this machine has one file system")
    params, sizes = TrainParams(recipe="next-item-nbpr", factors=64), (0, 1_000, 10**8)
    tables = 2 * 4 * 64 * 10**8
    of_ranks = reader.RANK_FILE_MODELS * tables
    # Biases and ids, and the blocks of one table with 32 more columns.
    of_job = int(reader.FILE_MODELS * tables + reader.SOLVED_BLOCKS / 2 * 1.5 * tables) + 2**34
    free = {tmp_path: of_job, other: of_ranks + 2**33}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=2**60, free=free[path])
    )
    for sharded in (False, True):
        reader.check_disk(params, tmp_path / "trainings", sizes, other / "ranks", sharded=sharded)
    free[tmp_path] -= tables
    reader.check_disk(params, tmp_path / "trainings", sizes, other / "ranks")
    with pytest.raises(TrainingError, match=f"GiB of disk in {tmp_path}/trainings for "):
        reader.check_disk(params, tmp_path / "trainings", sizes, other / "ranks", sharded=True)
    free |= {tmp_path: of_job, other: of_ranks}
    for sharded in (False, True):
        with pytest.raises(TrainingError, match=f"GiB of disk in {other}/ranks for "):
            reader.check_disk(
                params, tmp_path / "trainings", sizes, other / "ranks", sharded=sharded
            )
    with pytest.raises(TrainingError, match="make room there"):
        reader.check_disk(params, tmp_path / "a", sizes, tmp_path / "b", sharded=True)


def test_a_file_system_without_a_size_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, sizes = TrainParams(recipe="next-item-nbpr", factors=64), (10**6, 1_000, 10**8)
    for total, refused in ((1, True), (0, False)):
        usage = SimpleNamespace(total=total, free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        with pytest.raises(TrainingError) if refused else nullcontext():
            reader.check_disk(params, tmp_path, sizes, tmp_path / "ranks")


@pytest.mark.anyio
@pytest.mark.parametrize("tables", ["replicated", "sharded"])
async def test_a_training_in_ranks_checks_the_disk_of_their_folder(
    services: Services,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: str,
) -> None:
    await add_small_data(services)
    with_ranks = settings.model_copy(
        update={
            "train_engine": "torchrun",
            "train_ranks": 2,
            "train_tables": tables,
            "train_folder": tmp_path / "ranks",
        }
    )
    checked: list[Any] = []
    monkeypatch.setattr(reader, "check_disk", lambda *args, **named: checked.append((args, named)))
    for each in (settings, with_ranks):
        reads = TrainingReader(each, open_checkpoint_store(each), "cpu", Retry(0.0))
        _, snapshot = await asyncio.to_thread(reads.read_events, TrainParams())
        snapshot.close()
    (alone, none), (ranks, named) = checked[0], checked[-1]
    assert (alone[-1], none) == (None, {"sharded": False})
    assert (ranks[-1], named) == (tmp_path / "ranks", {"sharded": tables == "sharded"})


def _device(path: Path) -> int:
    return path.stat().st_dev


def test_sharded_tables_leave_recipes_of_auto_out() -> None:
    """The estimate has no NeuPR, which the job refuses."""
    sizes = (10**6, 10**4, 10**5)
    recipes = reader._recipes(TrainParams(recipe="auto"), *sizes, sharded=True)
    assert {each.model.kind for each in recipes} <= {"nbpr", "dncr"}
    assert len(recipes) < len(reader._recipes(TrainParams(recipe="auto"), *sizes, sharded=False))


def test_pooled_vectors_count_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = 10**6
    room = reader.FILE_ROW_BYTES * users + reader.FILE_TABLES * 4 * 64 * users
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**60, free=room))
    sizes = (0, users, 0)
    reader.check_disk(TrainParams(recipe="next-item-nbpr", factors=64), tmp_path, sizes)
    reader.check_disk(TrainParams(recipe="default", factors=256), tmp_path, sizes)
    with pytest.raises(TrainingError, match=r"about 0\.8 GiB of disk in \S+ for 1 events, "):
        reader.check_disk(TrainParams(recipe="next-item-nbpr", factors=64), tmp_path, (1, users, 0))
