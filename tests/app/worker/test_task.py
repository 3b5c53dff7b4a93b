"""The task that a worker sends to its child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.core.settings import Settings, load_settings
from app.jobs.schemas import TrainOrder
from app.worker.task import TASK, PrecomputeTask, TaskSettings, TrainingTask


def tasks(settings: Settings) -> list[TrainingTask | PrecomputeTask]:
    common: dict[str, Any] = {
        "version": "20261122-000000-00aa",
        "device": "cpu",
        "watchdog_seconds": 24.0,
        "retry_seconds": 300.0,
        "settings": TaskSettings.from_settings(settings),
    }
    params = TrainOrder.model_validate({"model": "nbpr", "learning_rate": 0.005})
    seconds = {"train": 10.5}
    training = TrainingTask(params=params, gate_margin=0.05, expected_seconds=seconds, **common)
    return [training, PrecomputeTask(**common)]


def test_a_task_is_the_same_on_both_sides_of_the_pipe(tmp_path: Path) -> None:
    for task in tasks(load_settings(data_dir=tmp_path)):
        assert TASK.validate_json(task.model_dump_json()) == task


def test_the_child_has_the_settings_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(
        data_dir=Path("var"), candidates=300, feedback='{"view": "seen"}', feedback_half_life_days=9
    )
    task = TASK.validate_json(tasks(settings)[0].model_dump_json())
    child = load_settings(**task.settings.model_dump())
    assert child.data_dir == tmp_path / "var"
    assert child.effective_database_url == settings.effective_database_url
    for name in ("candidates", "feedback", "feedback_half_life_days", "checkpoint_store"):
        assert getattr(child, name) == getattr(settings, name)


@pytest.mark.parametrize(
    "change", [{"kind": "sweep"}, {"watchdog_seconds": 0}, {"params": {"epochs": 0}}, {"more": 1}]
)
def test_an_invalid_task_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    task = json.loads(tasks(load_settings(data_dir=tmp_path))[0].model_dump_json())
    with pytest.raises(ValidationError):
        TASK.validate_json(json.dumps(task | change))
