"""The estimated time left of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from app.training.progress import PHASE_SHARES, ProgressReporter
from ncr_core.training import Progress


class TimedTraining:
    """A reporter on a clock that the test moves on, and what it has reported."""

    def __init__(self, expected_seconds: Mapping[str, float] | None = None) -> None:
        self.now = 100.0
        self.reports: list[dict[str, Any]] = []
        self.progress = ProgressReporter(
            self.reports.append, expected_seconds, clock=lambda: self.now
        )


def test_the_time_left_includes_the_phases_to_come() -> None:
    training = TimedTraining()
    training.now += 10
    training.progress.epoch(Progress("train nbpr", 1, 5, 0.123456, 0.25, 40.0))
    # 50 seconds of epochs in all, and what usually comes after them.
    last = training.reports[-1]
    assert last["eta_s"] == pytest.approx(40 + 50 * sum(PHASE_SHARES.values()), abs=0.1)
    assert (last["loss"], last["ndcg"]) == (0.12346, 0.25)
    training.now += 40
    training.progress.phase("evaluate")
    last = training.reports[-1]
    assert last["phase"] == "evaluate"
    assert last["eta_s"] == pytest.approx(50 * sum(PHASE_SHARES.values()), abs=0.1)
    training.now += 4
    training.progress.phase("compare with what is served")
    training.now += 3
    training.progress.step(1, 6)
    later = PHASE_SHARES["learn the held-out items"] + PHASE_SHARES["write checkpoint"]
    last = training.reports[-1]
    assert (last["epoch"], last["epochs"]) == (1, 6)
    assert last["eta_s"] == pytest.approx(15 + 50 * later, abs=0.1)
    training.progress.end()
    assert training.progress.seconds == {
        "train": 50.0, "evaluate": 4.0, "compare with what is served": 3.0
    }  # fmt: skip


def test_the_time_left_uses_the_seconds_of_an_earlier_training() -> None:
    training = TimedTraining({"train": 100.0, "evaluate": 7.0, "learn the held-out items": 2.0})
    training.now += 10
    training.progress.epoch(Progress("train nbpr", 1, 2, 0.5, None, 10.0))
    usual = PHASE_SHARES["compare with what is served"] + PHASE_SHARES["write checkpoint"]
    assert training.reports[-1]["eta_s"] == pytest.approx(10 + 7 + 2 + 20 * usual, abs=0.1)
