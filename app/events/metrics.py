"""What became of events."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.events.service import EventService

GROUP_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class EventMetrics:
    """Verdicts, sizes of the groups that were committed together, and what waits."""

    def __init__(self, registry: CollectorRegistry, events: EventService) -> None:
        self._events = events
        self._rows = Histogram(
            "ncr_event_group_rows", "Rows of a commit.", buckets=GROUP_ROWS, registry=registry
        )
        self._seconds = Histogram(
            "ncr_event_commit_seconds",
            "From the first statement of a group to its commit.",
            buckets=COMMIT_SECONDS,
            registry=registry,
        )
        events.writer.on_group = self._committed

    def _committed(self, rows: int, seconds: float) -> None:
        self._rows.observe(rows)
        self._seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        verdicts = CounterMetricFamily(
            "ncr_events", "Rows of events by what became of them.", labels=["verdict"]
        )
        for verdict, count in self._events.verdicts.items():
            verdicts.add_metric([verdict], count)
        yield verdicts
        yield GaugeMetricFamily(
            "ncr_events_waiting",
            "Rows that wait to be committed.",
            value=self._events.writer.held_rows,
        )
