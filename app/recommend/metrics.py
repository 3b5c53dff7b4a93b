"""Metrics of the model that serves: its version, age and last evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from app.core.tables import now_us
from app.events.service import EventService
from app.inference.model_manager import ModelManager


class ModelMetrics:
    """Collects the metrics of the model in this process."""

    def __init__(self, models: ModelManager, events: EventService) -> None:
        self._models = models
        self._events = events
        self._last_seq = 0

    async def refresh(self) -> None:
        """Reads the last seq from the database."""
        self._last_seq = await self._events.last_seq()

    def collect(self) -> Iterator[Metric]:
        """The metrics; without a model, only ``ncr_model_refused``."""
        model = self._models.current
        yield GaugeMetricFamily(
            "ncr_model_refused",
            "1 while this server cannot load the active version, otherwise 0.",
            value=float(self._models.refused is not None),
        )
        if model is None:
            return
        row = model.row
        about = InfoMetricFamily("ncr_model", "The version that this server uses.")
        about.add_metric(
            [], {"version": row.version, "model": row.kind, "factors": str(row.factors)}
        )
        yield about
        yield GaugeMetricFamily(
            "ncr_model_age_seconds",
            "The time since the training of the version, in seconds.",
            value=max(0.0, (now_us() - row.created_at) / 1e6),
        )
        yield GaugeMetricFamily(
            "ncr_model_events_behind",
            "Events and deletions after the training data of the version.",
            value=max(0, self._last_seq - row.trained_seq),
        )
        measured = GaugeMetricFamily(
            "ncr_model_evaluation",
            "The last evaluation of the version.",
            labels=["protocol", "metric"],
        )
        for protocol, figures in row.metrics.items():
            for name, value in figures.items() if isinstance(figures, dict) else ():
                if name in ("hr@10", "ndcg@10", "ece") and isinstance(value, int | float):
                    measured.add_metric([protocol, name], float(value))
        yield measured
