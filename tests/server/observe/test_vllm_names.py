"""With `--metrics-alias vllm`, dashboards that are made for vLLM find what they ask for."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.harness import MODEL, lift

GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "gpu_cache_usage_perc", "engine_sleep_state", "cache_config_info"),
)
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens", "request_success"),
)
HISTOGRAMS = {
    "iteration_tokens_total": 16384,
    "request_prompt_tokens": None,
    "request_generation_tokens": None,
    "request_max_num_generation_tokens": None,
    "request_params_n": 20,
    "request_params_max_tokens": None,
    "request_prefill_kv_computed_tokens": None,
    "time_to_first_token_seconds": 2560,
    "inter_token_latency_seconds": 80,
    "time_per_output_token_seconds": 80,
    "request_time_per_output_token_seconds": 80,
    "e2e_request_latency_seconds": 7680,
    "request_queue_time_seconds": 7680,
    "request_inference_time_seconds": 7680,
    "request_prefill_time_seconds": 7680,
    "request_decode_time_seconds": 7680,
}
"""With the last bound of their buckets, where that does not depend on the model.

Source of the three: vLLM's Prometheus logger of its engine V1 and the dashboards among its examples, whose
queries name no other metric but those of speculative decoding, LoRA and multimodal caches."""


async def scraped(alias: bool) -> dict[str, Metric]:
    settings = ServerSettings(observe=ObserveSettings(vllm_names=alias))
    async with lift(FakeRunner(answering("abc")), settings=settings) as server:
        await server.complete()
        await server.chat(temperature="hot")
        text = (await server.client.get("/metrics")).text
    assert "vllm_" not in text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_names_types_and_labels() -> None:
    found = await scraped(True)
    told = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert told == {*GAUGES, *COUNTERS, *HISTOGRAMS}
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            for sample in family.samples:
                assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "0"), name
    for name, last in HISTOGRAMS.items():
        bounds = [
            float(sample.labels["le"]) for sample in found[f"vllm:{name}"].samples if "le" in sample.labels
        ]
        assert bounds == sorted(bounds) and bounds[-1] == float("inf")
        assert last is None or bounds[-2] == last, name


async def test_values_are_ours() -> None:
    found = await scraped(True)
    for ours, theirs in (
        ("generation_tokens", "generation_tokens"),
        ("iteration_tokens", "iteration_tokens_total"),
        ("request_success", "request_success"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ):
        values = [sample.value for sample in found[f"chairlift_{ours}"].samples]
        assert values == [sample.value for sample in found[f"vllm:{theirs}"].samples] and any(values), ours


async def test_http_as_vllms_server_counts_it() -> None:
    found = await scraped(True)
    counts = {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in found["http_requests"].samples
    }
    assert counts == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/chat/completions", "POST", "4xx"): 1,
    }
    assert found["http_request_duration_seconds"].type == "histogram"


async def test_nothing_of_it_unless_asked() -> None:
    assert not [name for name in await scraped(False) if name.startswith(("vllm", "http_"))]
