"""Metrics of served and clicked lists, by version, and of running trials."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.ab_tests.impressions import ClickCounts
from app.ab_tests.schemas import Arm
from app.ab_tests.service import ABTestService
from app.registry.service import ModelRegistry

REFRESH_SECONDS = 60.0  # clicks are counted through an index, but there may be many


class ABTestMetrics:
    """Lists of this process, and lists and clicks of the active version over all servers."""

    def __init__(self, trials: ABTestService, models: ModelRegistry) -> None:
        self._trials = trials
        self._models = models
        self._last_day: tuple[str, ClickCounts] | None = None
        self._arms: dict[Arm, ClickCounts] = {}
        self._refreshed = float("-inf")

    async def refresh(self) -> None:
        """Reads the counts of the last day and of arms, at most every `REFRESH_SECONDS`."""
        if time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return
        version = (await self._models.activation()).version
        self._last_day = None
        if version is not None:
            self._last_day = version, await self._trials.click_through.last_day(version)
        settings = self._trials.settings_trials
        self._arms = {}
        if settings is not None and settings.running is not None:
            self._arms = await settings.totals(settings.running.trial_id)
        self._refreshed = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a Prometheus registry."""
        served_lists = CounterMetricFamily(
            "ncr_lists_served", "Lists served, by version.", labels=["version"]
        )
        for name, count in self._trials.impressions.lists.items():
            served_lists.add_metric([name], count)
        yield served_lists
        lists = GaugeMetricFamily(
            "ncr_lists_last_day",
            "Lists of the active version in the last 24 whole hours, on all servers.",
            labels=["version"],
        )
        clicked = GaugeMetricFamily(
            "ncr_clicked_lists_last_day",
            "Lists with a click among ncr_lists_last_day.",
            labels=["version"],
        )
        if self._last_day is not None:
            version, counts = self._last_day
            lists.add_metric([version], counts.lists)
            clicked.add_metric([version], counts.clicked)
        yield lists
        yield clicked
        arm_lists = GaugeMetricFamily(
            "ncr_trial_lists",
            "Lists of each arm of the running settings trial, on all servers.",
            labels=["arm"],
        )
        arm_clicked = GaugeMetricFamily(
            "ncr_trial_clicked_lists", "Lists with a click among ncr_trial_lists.", labels=["arm"]
        )
        for arm, counts in self._arms.items():
            arm_lists.add_metric([arm], counts.lists)
            arm_clicked.add_metric([arm], counts.clicked)
        yield arm_lists
        yield arm_clicked
        impressions = CounterMetricFamily(
            "ncr_interleaved_lists",
            "Interleaved lists by the outcome of their record. Lists of settings trials count "
            "only if the server dropped their record.",
            labels=["record"],
        )
        for record, count in self._trials.impressions.impressions.items():
            impressions.add_metric([record], count)
        yield impressions
        running = GaugeMetricFamily(
            "ncr_trials_running", "Running trials by kind.", labels=["kind"]
        )
        for name, kind in self._trials.kinds.items():
            running.add_metric([name], float(kind.running is not None))
        yield running
