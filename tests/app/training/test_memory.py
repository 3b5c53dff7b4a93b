"""The memory that a training needs and that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.jobs.schemas import TrainParams
from app.training import memory
from ncr_core.errors import TrainingError

SIZES = (5_000_000, 200_000, 20_000)
PARAMS = TrainParams(recipe="next-item")


def container(folder: Path, limit: str, used: int, of_files: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {of_files}\nactive_file 0\n")


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_taken_bytes", lambda: 0)


def test_files_that_a_container_has_read_leave_its_memory_free(tmp_path: Path) -> None:
    container(tmp_path, str(4 * 2**30), 4 * 2**30 - 2**20, 3 * 2**30)
    assert memory.available_bytes() == 3 * 2**30 + 2**20
    container(tmp_path, "max", 2**30, 0)
    assert memory.available_bytes() == 8 * 2**30


def test_a_limit_counts_the_whole_estimate_and_free_memory_what_trainings_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = memory.training_bytes(PARAMS, *SIZES)
    tight = int(0.8 * needed)
    with pytest.raises(TrainingError, match="GiB are allowed by NCR_TRAIN_MEMORY_BYTES"):
        memory.check_memory(PARAMS, SIZES, tight)
    memory.check_memory(PARAMS, SIZES, needed)
    container(tmp_path, str(tight), 0, 0)
    memory.check_memory(PARAMS, SIZES, None)
    container(tmp_path, str(needed // 2), 0, 0)
    with pytest.raises(TrainingError, match="GiB are free"):
        memory.check_memory(PARAMS, SIZES, None)
    monkeypatch.setattr(memory, "_taken_bytes", lambda: needed // 3)
    memory.check_memory(PARAMS, SIZES, None)
