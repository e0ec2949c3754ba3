"""What Prometheus sees. Names and buckets are vLLM's, under the prefix `chairlift:`: dashboards carry over.

Source of names: vLLM's documentation, Production Metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.engine.engine import Engine, EngineStats, RequestTiming
from chairlift.engine.events import FinishReason, Usage
from chairlift.engine.request import Request

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

PREFIX = "chairlift:"
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTERVAL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class ServerMetrics:
    """The engine's observer, over a registry of its own: two apps in a process do not mix.

    Counters and histograms grow as requests go; gauges are read from the engine when Prometheus asks, so they
    cannot be stale.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._interval = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", INTERVAL_BUCKETS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end.", REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From submission to admission.", REQUEST_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self._generation = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            f"{PREFIX}request_success",
            "Requests ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: success.labels(model_name, reason.value) for reason in FinishReason}
        self.registry.register(ProcessCollector(registry=None))

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(
            PREFIX + name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry
        )
        return metric.labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self.registry).labels(self.model_name)

    def watch(self, engine: Engine) -> None:
        """Read this engine's gauges at every scrape."""
        self.registry.register(EngineCollector(engine, self.model_name))

    def on_first_token(self, request: Request, timing: RequestTiming) -> None:
        self._prompt.inc(len(request.prompt_token_ids))
        self._generation.inc()
        _between(self._first_token, timing.queued, timing.first_token)
        _between(self._queue, timing.queued, timing.admitted)
        _between(self._prefill, timing.admitted, timing.first_token)

    def on_token_interval(self, seconds: float) -> None:
        self._generation.inc()
        self._interval.observe(seconds)

    def on_finished(
        self, request: Request, timing: RequestTiming, usage: Usage, reason: FinishReason
    ) -> None:
        self._ended[reason].inc()
        self._request_prompt.observe(usage.prompt_tokens)
        self._request_generation.observe(usage.completion_tokens)
        _between(self._whole, timing.queued, timing.finished)
        _between(self._decode, timing.first_token, timing.last_token)


def _between(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(max(0.0, end - start))


class EngineCollector(Collector):
    """Gauges (and counters the engine keeps itself), made of `Engine.stats()` at the moment of the scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in _gauges(stats):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        for name, text, value in _counts(stats):
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            counter.add_metric((self._model_name,), value)
            yield counter


def _gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    runner = stats.runner
    yield "num_requests_running", "Requests in the batch.", stats.running
    yield "num_requests_waiting", "Requests in the wait queue.", stats.waiting
    yield "kv_cache_bytes", "Bytes of all rows' states, padding included.", runner.kv_bytes
    yield "kv_cache_used_bytes", "Bytes that the rows' tokens need of them.", runner.kv_tokens_bytes
    yield "prefix_cache_bytes", "Bytes of prefixes kept for later requests.", stats.prefix.bytes
    yield "prefix_cache_limit_bytes", "Most bytes of kept prefixes.", stats.prefix.limit_bytes
    yield "prefix_cache_pinned_bytes", "Bytes of kept prefixes that do not go.", stats.prefix.pinned_bytes
    disk = stats.disk
    yield "prefix_cache_disk_bytes", "Bytes of prefixes on the disk, all models together.", disk.bytes
    yield "prefix_cache_disk_limit_bytes", "Most bytes of prefixes on the disk.", disk.limit_bytes
    yield "memory_active_bytes", "Bytes of live arrays.", runner.active_bytes
    yield "memory_cache_bytes", "Bytes freed and kept for reuse by the allocator.", runner.cache_bytes
    yield "memory_peak_bytes", "Most bytes of live arrays so far.", runner.peak_bytes
    yield "step_stalled_seconds", "Since the step now running began; 0 between steps.", stats.stalled_s
    if resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # In kilobytes on Linux, in bytes on macOS (getrusage(2) of each).
        yield (
            "process_peak_resident_memory_bytes",
            "Most resident memory of the process so far.",
            peak if sys.platform == "darwin" else peak * 1024,
        )


def _counts(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "engine_steps", "Steps of the engine.", stats.steps
    yield "num_preemptions", "Rows preempted.", stats.preemptions
    yield "num_rows_lost", "Rows started again after a failed step.", stats.lost
    yield "prefix_cache_queries", "Prompt tokens looked up among kept prefixes.", stats.prefix.queried_tokens
    yield "prefix_cache_hits", "Prompt tokens taken over from kept prefixes.", stats.prefix.hit_tokens
    yield "prefix_cache_evictions", "Pages and checkpoints dropped for room.", stats.prefix.evicted
    hits = stats.prefix.disk_hit_tokens
    yield "prefix_cache_disk_hits", "Prompt tokens taken over from the disk.", hits
    yield "prefix_cache_disk_reads", "Pages and checkpoints read from the disk.", stats.disk.reads
    yield "prefix_cache_disk_writes", "Pages and checkpoints written to the disk.", stats.disk.writes
    yield "prefix_cache_disk_skipped", "Pages and checkpoints that were not written.", stats.disk.skipped
    yield "prefix_cache_disk_failures", "Files not written, or not as they should be.", stats.disk.failures
    yield "wasted_tokens", "Tokens drawn ahead for rows that had ended.", stats.wasted_tokens
