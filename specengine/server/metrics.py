"""`/metrics`: the engine's gauges and counters as it reported them, and latencies as clients of the engine see them.

Owns the names (docs/deployment.md) and the buckets. Knows nothing about routes.

    metrics = Metrics(lambda: llm.stats)
    metrics.render()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from specengine.engine.messages import EngineStats, RequestDelta
from specengine.outputs import RequestMetrics

PREFIX = "specengine:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAUGES = {
    "num_requests_running": ("num_running", "sequences in the engine's batch"),
    "num_requests_waiting": ("num_waiting", "sequences that wait for a place in it"),
    "kv_cache_usage_perc": ("kv_cache_usage", "share of the KV blocks in use, 0 to 1"),
}
COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "prompt tokens found in it"),
    "num_preemptions": ("preemptions", "sequences that gave up their blocks to others"),
    "prompt_tokens": ("prompt_tokens", "tokens of prompts"),
    "generation_tokens": ("generation_tokens", "tokens of outputs"),
    "rolled_back_blocks": ("rolled_back_blocks", "KV blocks taken for drafts that were not accepted"),
}
BY_SOURCE = {
    "spec_decode_num_drafts": ("drafts_by_source", "drafts"),
    "spec_decode_num_draft_tokens": ("drafted_by_source", "drafted tokens"),
    "spec_decode_num_accepted_tokens": ("accepted_by_source", "drafted tokens that were accepted"),
}


class Metrics:
    """One registry for each app, so that several can live in a process."""

    def __init__(self, stats: Callable[[], EngineStats]):
        self.registry = CollectorRegistry()
        self.registry.register(StatsCollector(stats))
        self.success = Counter(PREFIX + "request_success", "choices that ended, by reason", ["finished_reason"], registry=self.registry)
        self.first_token = self._histogram("time_to_first_token_seconds", "from a request's arrival to its first token")
        self.inter_token = self._histogram("inter_token_latency_seconds", "between the tokens of a choice; those of one step share its gap")
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "from a request's arrival to its end")
        self.queue_time = self._histogram("request_queue_time_seconds", "from a request's arrival to its first step")

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def finished(self, metrics: RequestMetrics) -> None:
        """The times of a request that ran to its end."""
        if metrics.first_scheduled_time is not None:
            self.queue_time.observe(metrics.first_scheduled_time - metrics.arrival_time)
        if metrics.finished_time is not None:
            self.end_to_end.observe(metrics.finished_time - metrics.arrival_time)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=SECONDS, registry=self.registry)


class ChoiceClock:
    """Tells the latencies of one choice as its deltas come. `began` is the request's arrival, monotonic seconds."""

    def __init__(self, metrics: Metrics, began: float):
        self._metrics = metrics
        self._began = began
        self._last: float | None = None
        self._ended = False

    def feed(self, delta: RequestDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            if self._last is None:
                self._metrics.first_token.observe(now - self._began)
            else:
                for _ in delta.token_ids:
                    self._metrics.inter_token.observe((now - self._last) / len(delta.token_ids))
            self._last = now
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Counts how the choice ended, once."""
        if not self._ended:
            self._ended = True
            self._metrics.success.labels(reason).inc()


class StatsCollector(Collector):
    """The engine's last `EngineStats`, read when somebody asks."""

    def __init__(self, stats: Callable[[], EngineStats]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (field, text) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, getattr(stats, field))
        for name, (field, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, getattr(stats, field))
        for name, (field, text) in BY_SOURCE.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=["source"])
            for source, count in getattr(stats, field).items():
                family.add_metric([source], count)
            yield family
        positions = CounterMetricFamily(PREFIX + "spec_decode_num_accepted_tokens_per_pos", "by depth from 1", labels=["position"])
        for position, count in enumerate(stats.accepted_by_position, 1):
            positions.add_metric([str(position)], count)
        yield positions
        phases = SummaryMetricFamily(PREFIX + "step_seconds", "seconds of the engine's steps", labels=["phase"])
        for phase, seconds in stats.phase_seconds.items():
            phases.add_metric([phase], stats.steps, seconds)
        yield phases
