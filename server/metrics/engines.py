"""What engines tell of themselves when Prometheus asks, so that it cannot be stale."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.engine.engine import Engine, EngineConfig, EngineStats
from chairlift.engine.memory.vocabulary import MemoryStats
from chairlift.engine.plan import ModelInfo
from chairlift.server.metrics.model import ModelMetrics
from chairlift.server.metrics.names import MODEL, PREFIX

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

Row = tuple[str, str, float]
"""Name, what it is, value."""


class EngineCollector(Collector):
    """Gauges of the models that have an engine, and counts of all."""

    def __init__(self, models: Mapping[str, ModelMetrics]) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._tokens()
        engines = {name: model.engine for name, model in self._models.items() if model.engine is not None}
        stats = {name: engine.stats() for name, engine in engines.items()}
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, engine in engines.items():
            info = engine.info if hasattr(engine, "info") else None
            for kind, rows in (
                (GaugeMetricFamily, _gauges(engine, stats[name], info)),
                (CounterMetricFamily, _counts(stats[name])),
            ):
                for metric, text, value in rows:
                    family = families.get(metric)
                    if family is None:
                        family = families[metric] = kind(PREFIX + metric, text, labels=(MODEL,))
                    family.add_metric((name,), value)
        yield from families.values()
        if engines:
            yield _waiting(stats)
            yield _sleep(engines)
            yield from _configuration(engines)
        yield from _process(stats)

    def _tokens(self) -> Iterator[Metric]:
        generated = CounterMetricFamily(f"{PREFIX}generation_tokens", "Tokens generated.", labels=(MODEL,))
        intervals = HistogramMetricFamily(
            f"{PREFIX}inter_token_latency_seconds", "Between two tokens of a request.", labels=(MODEL,)
        )
        for name, model in self._models.items():
            generated.add_metric((name,), model.generated)
            model.intervals.add_to(intervals, (name,))
        yield generated
        yield intervals


def _gauges(engine: Engine, stats: EngineStats, info: ModelInfo | None) -> Iterator[Row]:
    config, runner, prefix, disk = engine.config, stats.runner, stats.prefix, stats.disk
    yield "model_ready", "1 once the model has decoded a token, until it stops.", engine.ready
    yield "num_requests_running", "Requests in the batch.", stats.running
    yield "num_requests_running_limit", "Most requests in the batch.", config.max_num_seqs
    yield "num_requests_waiting", "Requests in the wait queue.", stats.waiting
    yield "num_requests_waiting_limit", "Most requests in it, while no seat is free.", config.max_waiting
    yield "kv_cache_bytes", "Bytes of all rows' states, padding included.", runner.kv_bytes
    yield "kv_cache_used_bytes", "Bytes that the rows' tokens need of them.", runner.kv_tokens_bytes
    waste = max(0, runner.kv_bytes - runner.kv_tokens_bytes)
    yield "kv_cache_waste_bytes", "Bytes of them that cohorts hold for no token.", waste
    yield "kv_cache_usage_perc", "Share of the memory for rows' states that is used.", _usage(stats, info)
    yield "prefix_cache_bytes", "Bytes of prefixes kept for later requests.", prefix.bytes
    yield "prefix_cache_limit_bytes", "Most bytes of kept prefixes.", prefix.limit_bytes
    yield "prefix_cache_pinned_bytes", "Bytes of kept prefixes that do not go.", prefix.pinned_bytes
    yield "prefix_cache_pages", "Pages kept.", prefix.entries - prefix.checkpoints
    yield "prefix_cache_checkpoints", "Checkpoints kept, of models that resume at them.", prefix.checkpoints
    yield "prefix_cache_disk_bytes", "Bytes of prefixes on the disk, all models together.", disk.bytes
    yield "prefix_cache_disk_limit_bytes", "Most bytes of prefixes on the disk.", disk.limit_bytes
    yield "prefix_cache_disk_entries", "Pages and checkpoints of the model on the disk.", disk.entries
    yield "step_stalled_seconds", "Since the step now running began; 0 between steps.", stats.stalled_s
    memory = stats.memory
    yield "memory_rows_bytes", "Bytes of the budget that rows take, as projected.", memory.rows
    yield "memory_prefix_bytes", "Bytes of the budget that kept prefixes take.", memory.prefix
    if info is not None:
        yield "model_weight_bytes", "Bytes of the weights.", info.weight_bytes


def _counts(stats: EngineStats) -> Iterator[Row]:
    prefix, disk, memory = stats.prefix, stats.disk, stats.memory
    yield "memory_waits", "Times that a request had a seat and no memory.", memory.waits
    yield "memory_settled_steps", "Steps that waited for memory of the one before.", memory.settled
    yield "memory_reactions", "Times that more was in use than projected.", memory.reactions
    yield "engine_steps", "Steps of the engine.", stats.steps
    yield "num_preemptions", "Rows preempted.", stats.preemptions
    yield "num_rows_lost", "Rows started again after a failed step.", stats.lost
    yield "wasted_tokens", "Tokens drawn ahead for rows that had ended.", stats.wasted_tokens
    yield "step_compilations", "Times that a decode step was compiled.", stats.runner.step_compilations
    yield "compiled_steps", "Decode steps that were computed as compiled.", stats.runner.compiled_steps
    misses = prefix.queried_tokens - prefix.hit_tokens
    yield "prefix_cache_queries", "Prompt tokens looked up among kept prefixes.", prefix.queried_tokens
    yield "prefix_cache_hits", "Prompt tokens taken over from kept prefixes.", prefix.hit_tokens
    yield "prefix_cache_misses", "Prompt tokens looked up and not found.", misses
    yield "prefix_cache_evictions", "Pages and checkpoints dropped for room.", prefix.evicted
    yield "prefix_cache_checkpoints_taken", "Checkpoints taken.", prefix.checkpoints_taken
    queries = misses + prefix.disk_hit_tokens if disk.limit_bytes else 0
    yield "prefix_cache_disk_queries", "Prompt tokens that memory had not kept.", queries
    yield "prefix_cache_disk_hits", "Prompt tokens taken over from the disk.", prefix.disk_hit_tokens
    yield "prefix_cache_disk_reads", "Pages and checkpoints read from the disk.", disk.reads
    yield "prefix_cache_disk_writes", "Pages and checkpoints written to the disk.", disk.writes
    yield "prefix_cache_disk_skipped", "Pages and checkpoints that were not written.", disk.skipped
    yield "prefix_cache_disk_failures", "Files not written, or not as they should be.", disk.failures


def _budget(memories: Sequence[MemoryStats]) -> Iterator[Metric]:
    """What all models share."""
    reserved = GaugeMetricFamily(
        f"{PREFIX}memory_reserved_bytes", "Bytes of the budget that are fixed, by use.", labels=("use",)
    )
    for use in ("process", "weights", "headroom"):
        reserved.add_metric((use,), max(getattr(memory, use) for memory in memories))
    yield reserved
    for name, text, value in (
        ("limit", "The budget; 0: no bound.", max(memory.limit for memory in memories)),
        ("footprint", "Memory of the whole process.", max(memory.footprint for memory in memories)),
    ):
        yield GaugeMetricFamily(f"{PREFIX}memory_{name}_bytes", text, value=value)


def _usage(stats: EngineStats, info: ModelInfo | None) -> float:
    """Of the budget, what is fixed taken off; without one, of what the device has beside the weights."""
    memory = stats.memory
    if memory.limit:
        room = memory.limit - memory.process - memory.weights - memory.headroom
        return min(1.0, memory.rows / room) if room > 0 else 1.0
    room = info.memory_bytes - info.weight_bytes if info is not None else 0
    return stats.runner.kv_bytes / room if room > 0 else 0.0


def _waiting(stats: Mapping[str, EngineStats]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}num_requests_waiting_by_reason",
        "Requests in the wait queue: for a seat (capacity), or for the disk (deferred).",
        labels=(MODEL, "reason"),
    )
    for name, one in stats.items():
        family.add_metric((name, "capacity"), one.waiting - one.deferred)
        family.add_metric((name, "deferred"), one.deferred)
    return family


def _sleep(engines: Mapping[str, Engine]) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}engine_sleep_state",
        "1 at the state the engine is in: awake, or discard_all where its model is not loaded.",
        labels=(MODEL, "sleep_state"),
    )
    for name, engine in engines.items():
        family.add_metric((name, "awake"), engine.ready)
        family.add_metric((name, "weights_offloaded"), 0)
        family.add_metric((name, "discard_all"), not engine.ready)
    return family


def _configuration(engines: Mapping[str, Engine]) -> Iterator[Metric]:
    labels = (MODEL, "cache_dtype", "enable_prefix_caching", "kv_bytes_per_token", "max_num_seqs")
    family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "How states are kept; always 1.", labels=labels)
    for name, engine in engines.items():
        if hasattr(engine, "info"):
            family.add_metric((name, *_cache_labels(engine.info, engine.config)), 1)
    if family.samples:
        yield family


def _cache_labels(info: ModelInfo, config: EngineConfig) -> tuple[str, ...]:
    kept = str(bool(config.prefix_cache_bytes))
    return info.kv_dtype or info.dtype, kept, str(info.kv_bytes_per_token), str(config.max_num_seqs)


def _process(stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """Of the process, whatever it serves: all models share the device's allocator."""
    runners = [one.runner for one in stats.values()]
    rows: list[Row] = []
    if runners:
        yield from _budget([one.memory for one in stats.values()])
        active = max(runner.active_bytes for runner in runners)
        cache = max(runner.cache_bytes for runner in runners)
        peak = max(runner.peak_bytes for runner in runners)
        rows += [
            ("memory_active_bytes", "Bytes of live arrays.", active),
            ("memory_cache_bytes", "Bytes freed and kept for reuse by the allocator.", cache),
            ("memory_peak_bytes", "Most bytes of live arrays so far.", peak),
            (
                "memory_buffers",
                "Arrays of weights, requests' states and kept prefixes; each is a buffer of the device.",
                sum(runner.buffers for runner in runners),
            ),
            (
                "memory_buffers_limit",
                "Most buffers that the device lets a process have; 0: no such bound.",
                max(runner.buffers_limit for runner in runners),
            ),
        ]
    if resource is not None:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # In kilobytes on Linux, in bytes on macOS (getrusage(2) of each).
        largest *= 1 if sys.platform == "darwin" else 1024
        text = "Most resident memory of the process so far."
        rows.append(("process_peak_resident_memory_bytes", text, largest))
    for name, text, value in rows:
        yield GaugeMetricFamily(PREFIX + name, text, value=value)
