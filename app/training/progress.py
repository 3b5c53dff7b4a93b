"""Progress of a training: its phase, and the estimated seconds until the training is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ncr_core.training import Progress

Report = Callable[[dict[str, Any]], None]

TRAIN = "train"
MAX_CURVE_POINTS = 200  # of some 60 bytes: they travel with each report, and stay with the version
PHASE_SHARES = {
    "evaluate": 0.15,
    "compare with what is served": 0.15,
    "learn the held-out items": 0.1,
    "learn from attributes": 0.02,
    "write checkpoint": 0.01,
}
"""The usual time of each phase after the epochs, as a share of the epochs; as on MovieLens 1M."""


def phase_progress(phase: str, eta_s: float | None = None) -> dict[str, Any]:
    """The progress of a phase that has no epochs."""
    return {"phase": phase, "epoch": 0, "epochs": 0, "loss": None, "ndcg": None, "eta_s": eta_s}


def throttled(report: Report, seconds: float = 1.0) -> Callable[[str, int, int], None]:
    """A function that reports the progress of a phase, at most once in ``seconds``."""
    last, last_phase = 0.0, ""

    def report_progress(phase: str, done: int, of: int) -> None:
        nonlocal last, last_phase
        if phase != last_phase or time.monotonic() - last > seconds:
            last, last_phase = time.monotonic(), phase
            report(phase_progress(phase) | {"epoch": done, "epochs": of})

    return report_progress


class ProgressReporter:
    """Reports the phases of a training, and times them."""

    def __init__(
        self,
        report: Report,
        expected_seconds: Mapping[str, float] | None = None,
        choice_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts the clock of the epochs.

        Args:
            report: Receives each progress report.
            expected_seconds: Seconds that each phase of an earlier training took.
            choice_seconds: Seconds that a choice among recipes will take. The epochs of each recipe
                are only a part of the choice.
            clock: Gives the time in seconds.
        """
        self.curve: list[dict[str, Any]] = []
        """Loss and NDCG@10 of each epoch, by phase; in a long training, each 2nd, 4th, …."""
        self._epochs = 0
        self._every = 1
        self.seconds: dict[str, float] = {}
        """Seconds of each phase that has ended; all epochs are one phase."""
        self._report = report
        self._expected_seconds = expected_seconds or {}
        self._choice_seconds = choice_seconds
        self._clock = clock
        self._phase = TRAIN
        self._phase_start = clock()

    def epoch(self, progress: Progress) -> None:
        """Reports the end of an epoch."""
        elapsed = self._clock() - self._phase_start
        left = max(progress.eta_s, self._choice_seconds - elapsed)
        later = sum(self._estimate(phase, elapsed + left) for phase in PHASE_SHARES)
        loss = round(progress.loss, 5)
        ndcg = None if progress.ndcg is None else round(progress.ndcg, 5)
        self._add_to_curve(progress, loss, ndcg)
        self._report(
            {
                "phase": progress.phase,
                "epoch": progress.epoch,
                "epochs": progress.epochs,
                "loss": loss,
                "ndcg": ndcg,
                "eta_s": round(left + later, 1),
                "curve": self.curve,
            }
        )

    def _add_to_curve(self, progress: Progress, loss: float, ndcg: float | None) -> None:
        self._epochs += 1
        if self._epochs % self._every and progress.epoch not in (1, progress.epochs):
            return
        point = {"phase": progress.phase, "epoch": progress.epoch, "loss": loss, "ndcg": ndcg}
        self.curve.append(point)
        if len(self.curve) > MAX_CURVE_POINTS:
            # Each phase keeps its ends.
            last = len(self.curve) - 1
            self.curve[:] = [
                each
                for n, each in enumerate(self.curve)
                if n % 2 == 0
                or n == last
                or each["phase"] != self.curve[n + 1]["phase"]
                or each["phase"] != self.curve[n - 1]["phase"]
            ]
            self._every *= 2

    def phase(self, phase: str) -> None:
        """Reports the start of the next phase."""
        self.end()
        self._phase = phase
        progress = phase_progress(phase, self._remaining(self._estimate(phase)))
        self._report(progress | {"curve": self.curve})

    def step(self, done: int, steps: int) -> None:
        """Reports that ``done`` of the phase's steps are done."""
        elapsed = self._clock() - self._phase_start
        remaining = self._remaining(elapsed / done * (steps - done))
        progress = phase_progress(self._phase, remaining)
        self._report(progress | {"epoch": done, "epochs": steps, "curve": self.curve})

    def end(self) -> None:
        """Ends the phase."""
        now = self._clock()
        self.seconds[self._phase] = round(now - self._phase_start, 2)
        self._phase_start = now

    def _estimate(self, phase: str, train_seconds: float | None = None) -> float:
        if train_seconds is None:
            train_seconds = self.seconds[TRAIN]
        usual = PHASE_SHARES.get(phase, 0.0) * train_seconds
        return self._expected_seconds.get(phase, usual)

    def _remaining(self, phase_seconds: float) -> float:
        """The seconds left: ``phase_seconds`` of this phase, and estimates of all later phases."""
        phases = list(PHASE_SHARES)
        later = phases[phases.index(self._phase) + 1 :] if self._phase in phases else []
        return round(phase_seconds + sum(self._estimate(phase) for phase in later), 1)
