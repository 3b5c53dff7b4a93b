"""Metrics of the ranker and its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.core.cache import ByteCache
from app.core.monitoring import new_registry
from app.core.redis import RedisClient

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class InferenceMetrics:
    """Queue times, compute times, batch sizes, pairs, refused and dropped requests, fallbacks."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or new_registry()
        self.queue_seconds = Histogram(
            "ncr_rank_queue_seconds",
            "The time of a request in the queue before its batch, in seconds.",
            buckets=SECONDS,
            registry=registry,
        )
        self.compute_seconds = Histogram(
            "ncr_rank_compute_seconds",
            "The time of one batch in the ranker, in seconds.",
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "ncr_rank_batch_size", "Requests per batch.", buckets=SIZES, registry=registry
        )
        self.pairs = Counter(
            "ncr_rank_pairs", "Pairs of items that the network compared.", registry=registry
        )
        self.refused = Counter(
            "ncr_rank_refused",
            "Requests that got 503 because the queue was full.",
            registry=registry,
        )
        self.dropped = Counter(
            "ncr_rank_dropped",
            "Requests dropped because the client disconnected or the time ran out.",
            registry=registry,
        )
        self.fallbacks = Counter(
            "ncr_rank_device_fallbacks",
            "Batches that did not fit into the memory of the device, by the fallback.",
            ["to"],
            registry=registry,
        )

    def passed(self, seconds: float, queued: Sequence[float]) -> None:
        """Records a pass of ``seconds``; ``queued`` has each request's wait, in seconds."""
        self.compute_seconds.observe(seconds)
        self.batch_size.observe(len(queued))
        for waited in queued:
            self.queue_seconds.observe(waited)


class CacheMetrics(Collector):
    """Hits, misses and bytes of the caches, read at each scrape."""

    def __init__(self, registry: CollectorRegistry, redis: RedisClient | None = None) -> None:
        self._caches: dict[str, ByteCache[Any, Any]] = {}
        self._redis = redis
        registry.register(self)

    def add(self, name: str, cache: ByteCache[Any, Any]) -> None:
        """Adds a cache under a name, in place of an earlier cache of the same name."""
        self._caches[name] = cache

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """The metrics of all caches and of Redis."""
        asked = CounterMetricFamily(
            "ncr_cache_requests", "Lookups in a cache.", labels=["cache", "tier", "result"]
        )
        size = GaugeMetricFamily(
            "ncr_cache_bytes", "The size of a cache in bytes.", labels=["cache"]
        )
        for name, cache in self._caches.items():
            asked.add_metric([name, "process", "hit"], cache.hits)
            asked.add_metric([name, "process", "miss"], cache.misses)
            size.add_metric([name], cache.size)
        if self._redis is None:
            return [asked, size]
        for result in ("hit", "miss"):
            asked.add_metric(["lists", "redis", result], self._redis.calls[result])
        failed = CounterMetricFamily("ncr_redis_failures", "Failed calls to Redis.")
        failed.add_metric([], self._redis.calls["failed"])
        there = GaugeMetricFamily(
            "ncr_redis_available",
            "1 while Redis is available, otherwise 0.",
            value=float(self._redis.available),
        )
        return [asked, size, failed, there]
