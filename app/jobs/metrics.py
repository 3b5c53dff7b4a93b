"""Prometheus metrics of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric

from app.core.tables import now_us
from app.jobs.schemas import Kind, Status
from app.jobs.service import JobService


class JobMetrics:
    """Jobs by state, of the whole service, so that every server reports the same numbers."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs
        self._states: list[tuple[str, str, int, int]] = []

    async def refresh(self) -> None:
        """Reads the states from the database."""
        self._states = await self._jobs.states()

    def collect(self) -> Iterator[Metric]:
        """The metrics, as of the last refresh."""
        states = GaugeMetricFamily("ncr_jobs", "Jobs by state.", labels=["kind", "status"])
        waited = 0.0
        # Zeros, too: the first failure would otherwise be no change of a series.
        counts = dict.fromkeys(product(get_args(Kind), get_args(Status)), 0)
        for kind, status, count, oldest in self._states:
            counts[kind, status] = count
            if status == "queued":
                waited = max(waited, (now_us() - oldest) / 1e6)
        for labels, count in counts.items():
            states.add_metric(labels, count)
        yield states
        yield GaugeMetricFamily(
            "ncr_job_waiting_seconds",
            "The waiting time of the oldest queued job, in seconds.",
            value=waited,
        )
