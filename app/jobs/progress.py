"""Where a training stands: the phase, and the time that is left of all that follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ncr_core.training import Progress

Report = Callable[[dict[str, Any]], None]

TRAIN = "train"
# Seconds for each second of the epochs, as on MovieLens 1M: until a training has been timed.
USUAL = {
    "evaluate": 0.15,
    "compare with what is served": 0.15,
    "learn the held-out items": 0.1,
    "write checkpoint": 0.01,
}


def stage(phase: str, eta_s: float | None = None) -> dict[str, Any]:
    """The progress of a phase that has no epochs."""
    return {"phase": phase, "epoch": 0, "epochs": 0, "loss": None, "ndcg": None, "eta_s": eta_s}


class Clock:
    """Reports the phases of a training, and times them.

    ``expected`` are the ``seconds`` of an earlier training: they tell how much comes after the
    epochs.
    """

    def __init__(self, report: Report, expected: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """By phase, of those that have ended; all epochs are one."""
        self._report = report
        self._expected = expected or {}
        self._phase = TRAIN
        self._began = time.perf_counter()

    def epoch(self, progress: Progress) -> None:
        """An epoch of training has ended."""
        whole = time.perf_counter() - self._began + progress.eta_s
        later = sum(self._estimate(phase, whole) for phase in USUAL)
        self._report(
            {
                "phase": progress.phase,
                "epoch": progress.epoch,
                "epochs": progress.epochs,
                "loss": round(progress.loss, 5),
                "ndcg": None if progress.ndcg is None else round(progress.ndcg, 5),
                "eta_s": round(progress.eta_s + later, 1),
            }
        )

    def phase(self, phase: str) -> None:
        """The next phase begins."""
        self.end()
        self._phase = phase
        self._report(stage(phase, self._left(self._estimate(phase), phase)))

    def part(self, done: int, of: int) -> None:
        """So much of the phase is done."""
        spent = time.perf_counter() - self._began
        left = self._left(spent / done * (of - done), self._phase)
        self._report(stage(self._phase, left) | {"epoch": done, "epochs": of})

    def end(self) -> None:
        """The phase has ended."""
        now = time.perf_counter()
        self.seconds[self._phase] = round(now - self._began, 2)
        self._began = now

    def _estimate(self, phase: str, train: float | None = None) -> float:
        usual = USUAL.get(phase, 0.0) * (self.seconds[TRAIN] if train is None else train)
        return self._expected.get(phase, usual)

    def _left(self, of_this: float, phase: str) -> float:
        names = list(USUAL)
        after = names[names.index(phase) + 1 :] if phase in names else []
        return round(of_this + sum(self._estimate(name) for name in after), 1)
