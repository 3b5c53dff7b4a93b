"""Metrics of events: rows by outcome, sizes and durations of group commits, and the queue."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.events.service import EventService

GROUP_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class GroupCommitMetrics:
    """Histograms of group commits, which can exist before the observed service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = Histogram(
            "ncr_event_group_rows", "Rows per commit.", buckets=GROUP_ROWS, registry=registry
        )
        self._seconds = Histogram(
            "ncr_event_commit_seconds",
            "The time from the first statement of a group to its commit, in seconds.",
            buckets=COMMIT_SECONDS,
            registry=registry,
        )

    def observe(self, rows: int, seconds: float) -> None:
        """Record one commit."""
        self._rows.observe(rows)
        self._seconds.observe(seconds)


class EventMetrics:
    """Counters of the service, read at each scrape."""

    def __init__(self, events: EventService) -> None:
        self._events = events

    def collect(self) -> Iterator[Metric]:
        """Yield the rows by outcome and the length of the queue."""
        verdicts = CounterMetricFamily(
            "ncr_events", "Rows of events, by outcome.", labels=["verdict"]
        )
        for verdict, count in self._events.row_counts.items():
            verdicts.add_metric([verdict], count)
        yield verdicts
        yield GaugeMetricFamily(
            "ncr_events_waiting",
            "Rows that wait for a commit.",
            value=self._events.group_commit.pending_rows,
        )
