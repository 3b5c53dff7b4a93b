"""Which model serves, how old it is, and how it did when it was measured."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from app.core.metadata import now_us
from app.events.service import EventService
from app.recommend.model_host import ModelHost


class ModelMetrics:
    """Of the model in this process."""

    def __init__(self, host: ModelHost, events: EventService) -> None:
        self._host = host
        self._events = events
        self._last_seq = 0

    async def refresh(self) -> None:
        self._last_seq = await self._events.last_seq()

    def collect(self) -> Iterator[Metric]:
        model = self._host.current
        yield GaugeMetricFamily(
            "ncr_model_refused",
            "1 while the active version could not be loaded here.",
            value=float(self._host.refused is not None),
        )
        if model is None:
            return
        row = model.row
        about = InfoMetricFamily("ncr_model", "The model that answers.")
        about.add_metric(
            [], {"version": row.version, "model": row.kind, "factors": str(row.factors)}
        )
        yield about
        yield GaugeMetricFamily(
            "ncr_model_age_seconds",
            "Since it was trained.",
            value=max(0.0, (now_us() - row.created_at) / 1e6),
        )
        yield GaugeMetricFamily(
            "ncr_model_events_behind",
            "Events and deletions that it was not trained on.",
            value=max(0, self._last_seq - row.trained_seq),
        )
        measured = GaugeMetricFamily(
            "ncr_model_evaluation", "Its last evaluation.", labels=["protocol", "metric"]
        )
        for protocol, figures in row.metrics.items():
            for name, value in figures.items() if isinstance(figures, dict) else ():
                if name in ("hr@10", "ndcg@10", "ece") and isinstance(value, int | float):
                    measured.add_metric([protocol, name], float(value))
        yield measured
