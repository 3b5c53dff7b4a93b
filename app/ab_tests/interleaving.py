"""Interleaving trials: lists with items of two versions, and the clicks on each version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.ab_tests.assignment import is_in_share, user_number
from app.ab_tests.impressions import ImpressionBuffer
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestRow, Kind, RunningABTest
from app.core.database import Database
from app.core.tables import now_us
from app.events.click_attribution import ClickAttribution
from ncr_core.online import (
    InterleavingResult,
    Outcome,
    Teams,
    credit,
    interleaving_over_time,
    outcome_of,
)

MAX_POINTS = 60
"""The largest number of steps in a report's difference over time."""
_MINUTE_US = 60_000_000
_STEPS = tuple(minutes * _MINUTE_US for minutes in (1, 5, 15, 60, 120, 180, 360, 720, 1440))


class InterleavingTrials:
    """Decides which users take part, records their lists, and reports which version they prefer."""

    kind: Kind = "interleaving"

    def __init__(
        self, database: Database, attribution: ClickAttribution, impressions: ImpressionBuffer
    ) -> None:
        self._repository = ABTestRepository(database)
        self._attribution = attribution
        self._impressions = impressions
        self.running: RunningABTest | None = None
        """The running trial, as `ABTestService.refresh` last read it."""

    def includes(self, trial: RunningABTest, user: str) -> bool:
        """Whether a user takes part. The answer is the same in the whole trial."""
        return is_in_share(user_number(trial.trial_id, user), trial.share)

    def record(
        self,
        recommendation_id: str,
        trial: RunningABTest,
        user_id: int | None,
        team_a: Sequence[int],
        team_b: Sequence[int],
    ) -> None:
        """Records which version contributed which item (internal ids) to an interleaved list."""
        self._impressions.add_impression(recommendation_id, trial.trial_id, user_id, team_a, team_b)

    async def report(self, trial: ABTestRow) -> dict[str, Any]:
        """The clicks of a trial, by version and by user, and a test of the difference."""
        lists = await self._repository.count_impressions(trial.trial_id)
        credit_sums: Counter[str] = Counter()
        clicked_lists: list[_ClickedList] = []
        # Each list of an unknown user is a user of its own.
        numbers: dict[int | str, int] = {}
        async for clicked in self._attribution.clicks(trial.trial_id):
            impressions = await self._repository.impressions(trial.trial_id, clicked)
            for recommendation_id, user, teams, created_at in impressions:
                a, b = credit(clicked[recommendation_id], Teams(teams["a"], teams["b"]))
                if not a and not b:
                    continue
                credit_sums.update(a=a, b=b)
                name = recommendation_id if user is None else user
                number = numbers.setdefault(name, len(numbers))
                clicked_lists.append((created_at, number, outcome_of(a, b)))
        # In a thread: of a million lists it takes a second.
        result, more = await asyncio.to_thread(_results, trial, clicked_lists)
        return {
            "lists": lists,
            "clicked": len(clicked_lists),
            "credit_a": credit_sums["a"],
            "credit_b": credit_sums["b"],
            **result.as_dict(),
            "better": _better(trial, result),
            **more,
        }


_ClickedList = tuple[int, int, Outcome]
"""Time of serving in microseconds since 1970, number of the user, and version that won."""


def _results(
    trial: ABTestRow, clicked_lists: list[_ClickedList]
) -> tuple[InterleavingResult, dict[str, Any]]:
    """The result of all lists, and the fields `series` and `planned` of the report."""
    clicked_lists.sort()
    rows = np.array(clicked_lists, dtype=np.int64).reshape(-1, 3)
    times, planned = rows[:, 0], trial.planned_clicked
    ends = _ends(trial.created_at, trial.ended_at or now_us()) if len(rows) else []
    counts = [int(np.searchsorted(times, end, side="right")) for end in ends]
    reached = planned is not None and len(rows) >= planned
    cuts = [*counts, len(rows), *([planned] if reached and planned is not None else [])]
    results = interleaving_over_time(rows[:, 1], rows[:, 2], cuts)
    series = [
        {"at": end, "clicked": count, "difference": each.difference, "interval": each.interval}
        for end, count, each in zip(ends, counts, results, strict=False)
        if count
    ]
    more: dict[str, Any] = {"series": series}
    if reached and planned is not None:
        one = results[-1]
        more["planned"] = {
            **one.as_dict(), "better": _better(trial, one), "at": int(times[planned - 1])
        }  # fmt: skip
    return results[len(ends)], more


def _ends(begin: int, end: int) -> list[int]:
    """Times at equal distances for a chart, followed by the end, in microseconds since 1970."""
    step = next((step for step in _STEPS if end - begin <= MAX_POINTS * step), end - begin)
    inner = range((begin // step + 1) * step, end, step)
    return [*inner, end]


def _better(trial: ABTestRow, result: InterleavingResult) -> str | None:
    return {"a": trial.version_a, "b": trial.version_b, None: None}[result.better]
