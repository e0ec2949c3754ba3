"""What `/metrics` answers: the registry as text, maybe also under another server's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from chairlift.server.metrics.names import PREFIX

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Whatever the client accepts: in OpenMetrics, prometheus-client 0.26 writes the colon of vLLM's names as an
underscore, and dashboards would find nothing."""

RENAMED = {
    "iteration_tokens": "vllm:iteration_tokens_total",
    "prefix_cache_disk_queries": "vllm:external_prefix_cache_queries",
    "prefix_cache_disk_hits": "vllm:external_prefix_cache_hits",
}
SAME = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("engine_sleep_state", "kv_cache_usage_perc", "cache_config_info", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_by_source"),
    *("prompt_tokens_cached", "generation_tokens", "request_success", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "request_prefill_kv_computed_tokens", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
)
VLLM_NAMES = {PREFIX + name: f"vllm:{name}" for name in SAME} | {
    PREFIX + name: alias for name, alias in RENAMED.items()
}
"""Ours, and vLLM's for the same."""
OLDER = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}
"""vLLM's names of today, and those that dashboards of its earlier versions ask for."""
HTTP_NAMES = {
    f"{PREFIX}http_requests": "http_requests",
    f"{PREFIX}http_request_duration_seconds": "http_request_duration_seconds",
}
"""What the instrumentation of vLLM's HTTP server calls them."""


class Exposed(Collector):
    """All of a registry but `_created` samples, which Prometheus' text format has no use for.

    Args:
        vllm: show vLLM's names beside ours.
    """

    def __init__(self, registry: Collector, *, vllm: bool) -> None:
        self._registry = registry
        self._vllm = vllm

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            yield _copied(family, family.name)
            if self._vllm:
                yield from _aliased(family)


def exposition(registry: Collector, *, vllm: bool = False) -> bytes:
    return generate_latest(Exposed(registry, vllm=vllm))


def _aliased(family: Metric) -> Iterator[Metric]:
    if (name := VLLM_NAMES.get(family.name)) is not None:
        for alias in (name, OLDER.get(name)):
            if alias is not None:
                yield _copied(family, alias, engine="0")
    if (name := HTTP_NAMES.get(family.name)) is not None:
        yield _http(family, name)


def _copied(family: Metric, name: str, **labels: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_created":
            copy.samples.append(Sample(name + suffix, {**sample.labels, **labels}, sample.value))
    return copy


def _http(family: Metric, name: str) -> Metric:
    """`handler` for the route, and the statuses by their hundreds: `2xx`."""
    copy = _copied(family, name)
    summed: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in copy.samples:
        labels = {"handler" if key == "route" else key: value for key, value in sample.labels.items()}
        if "status" in labels:
            labels["status"] = labels["status"][:1] + "xx"
        key = sample.name, tuple(labels.items())
        summed[key] = summed.get(key, 0.0) + sample.value
    copy.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in summed.items()]
    return copy


__all__ = ["CONTENT_TYPE", "VLLM_NAMES", "Exposed", "exposition"]
