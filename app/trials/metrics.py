"""Lists that were given out and clicked, by version."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.models.service import ModelRegistry
from app.trials.click_through import Clicks
from app.trials.service import TrialService

REFRESH_SECONDS = 60.0  # clicks are counted through an index, but there may be many


class TrialMetrics:
    """What this process gave out, and of the active version what the whole service did."""

    def __init__(self, trials: TrialService, models: ModelRegistry) -> None:
        self._trials = trials
        self._models = models
        self._day: tuple[str, Clicks] | None = None
        self._refreshed = float("-inf")

    async def refresh(self) -> None:
        if time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return
        version = (await self._models.activation()).version
        self._day = (
            None if version is None else (version, await self._trials.clicks.last_day(version))
        )
        self._refreshed = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        served = CounterMetricFamily(
            "ncr_lists_served", "Lists that were given out, by version.", labels=["version"]
        )
        for name, count in self._trials.observed.lists.items():
            served.add_metric([name], count)
        yield served
        lists = GaugeMetricFamily(
            "ncr_lists_last_day",
            "Lists of the active version in the last 24 whole hours, of all servers.",
            labels=["version"],
        )
        clicked = GaugeMetricFamily(
            "ncr_clicked_lists_last_day", "Those of them that were clicked.", labels=["version"]
        )
        if self._day is not None:
            version, day = self._day
            lists.add_metric([version], day.lists)
            clicked.add_metric([version], day.clicked)
        yield lists
        yield clicked
        impressions = CounterMetricFamily(
            "ncr_interleaved_lists",
            "Lists drafted from two versions, by what became of their record.",
            labels=["record"],
        )
        for record, count in self._trials.observed.impressions.items():
            impressions.add_metric([record], count)
        yield impressions
        running = GaugeMetricFamily("ncr_trials_running", "Trials by kind.", labels=["kind"])
        for kind in ("interleaving", "shadow"):
            running.add_metric([kind], float(getattr(self._trials, kind) is not None))
        yield running
