"""/metrics and /health, as Prometheus and an operator read them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from chairlift.engine.engine import EngineConfig
from chairlift.engine.request import Request
from chairlift.server.metrics import ServerMetrics
from chairlift.server.settings import ServerSettings
from tests.fakes import KV_BYTES_PER_TOKEN, FakeRunner, Fault, all_rows, answering
from tests.server.harness import error_of, lift

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "kv_cache_bytes",
    "kv_cache_used_bytes",
    "memory_active_bytes",
    "memory_cache_bytes",
    "memory_peak_bytes",
    "process_peak_resident_memory_bytes",
    "engine_steps",
    "num_preemptions",
    "num_rows_lost",
    "wasted_tokens",
    "step_stalled_seconds",
    "prefix_cache_bytes",
    "prefix_cache_limit_bytes",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_evictions",
    "prefix_cache_pinned_bytes",
    "prefix_cache_disk_bytes",
    "prefix_cache_disk_limit_bytes",
    "prefix_cache_disk_hits",
    "prefix_cache_disk_reads",
    "prefix_cache_disk_writes",
    "prefix_cache_disk_skipped",
    "prefix_cache_disk_failures",
}


async def test_names_and_labels() -> None:
    accept = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"
    async with lift(FakeRunner(answering("abc"))) as server:
        response = await server.client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    ours = [f for f in text_string_to_metric_families(response.text) if f.name.startswith("chairlift:")]
    names = {family.name.removeprefix("chairlift:") for family in ours}
    assert {name for name in names if not name.endswith("_created")} == NAMES
    assert {sample.labels["model_name"] for family in ours for sample in family.samples} == {"org/fake"}


async def test_counts_after_some_requests() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        await server.complete(prompt="12345")
        await server.complete(prompt=["1", "12"], max_tokens=2)
        server.runner.fail_next(Fault(fail=all_rows))
        await server.complete(prompt="x")
        assert await server.metric("prompt_tokens_total") == 5 + 1 + 2
        assert await server.metric("generation_tokens_total") == 4 + 2 + 2
        assert await server.metric('request_success_total{finished_reason="stop"}') == 1
        assert await server.metric('request_success_total{finished_reason="length"}') == 2
        assert await server.metric('request_success_total{finished_reason="error"}') == 1
        assert await server.metric('request_success_total{finished_reason="abort"}') == 0
        assert await server.metric("time_to_first_token_seconds_count") == 3
        assert await server.metric("inter_token_latency_seconds_count") == 3 + 1 + 1
        assert await server.metric("e2e_request_latency_seconds_count") == 4
        assert await server.metric("request_queue_time_seconds_count") == 3
        assert await server.metric("request_decode_time_seconds_count") == 3
        assert await server.metric("request_prompt_tokens_sum") == 9
        assert await server.metric("request_generation_tokens_sum") == 8
        await server.until_idle()
        assert await server.metric("num_requests_running") == 0
        assert await server.metric("kv_cache_bytes") == 0


async def test_gauges_are_read_at_the_scrape() -> None:
    async with lift(config=EngineConfig(max_num_seqs=1)) as server:
        runner = server.runner
        runner.close_gate()
        first = server.engine.submit(Request("a", (97,) * 7))
        second = server.engine.submit(Request("b", (97,)))
        await runner.at_gate()
        await runner.let_through()
        assert await server.metric("num_requests_running") == 1
        assert await server.metric("num_requests_waiting") == 1
        assert await server.metric("step_stalled_seconds") > 0
        second.cancel()
        assert await server.metric("num_requests_waiting") == 0
        first.cancel()
        runner.open_gate()
        await server.until_idle()
        assert await server.metric("step_stalled_seconds") == 0
        assert KV_BYTES_PER_TOKEN > 0 and await server.metric("kv_cache_bytes") == 0


def test_two_apps_do_not_share_a_registry() -> None:
    one, two = ServerMetrics("a"), ServerMetrics("b")
    one.on_token_interval(1.0)
    name, labels = "chairlift:generation_tokens_total", {"model_name": "a"}
    assert one.registry.get_sample_value(name, labels) == 1
    assert two.registry.get_sample_value(name, labels) is None


async def test_health() -> None:
    async with lift(start=False) as server:
        loading = await server.client.get("/health/ready")
        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        live = await server.client.get("/health")
        assert (live.status_code, live.json()["status"]) == (200, "loading")
        assert live.json()["last_step_age_s"] is None
        await server.engine.start()
        ready = await server.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        await server.until_idle()
        live = await server.client.get("/health")
        assert (live.json()["status"], live.json()["busy"]) == ("ok", False)
        assert live.json()["last_step_age_s"] >= 0
        await server.engine.stop()
        stopped = await server.client.get("/health/ready")
        assert (stopped.status_code, stopped.json()["status"]) == (503, "draining")
        assert set(stopped.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_wedge_shows() -> None:
    async with lift(settings=ServerSettings(wedge_after_s=0.0)) as server:
        await server.until_idle()
        assert (await server.client.get("/health")).status_code == 200  # idle is not wedged
        server.runner.close_gate()
        async with server.engine.submit(Request("a", (97,))):
            await server.runner.at_gate()
            wedged = await server.client.get("/health")
            assert (wedged.status_code, wedged.json()["status"]) == (503, "stalled")
            assert wedged.json()["running"] == 1
            assert "one step" in wedged.json()["error"]["message"]
            server.runner.open_gate()
        await server.until_idle()
        assert (await server.client.get("/health")).status_code == 200


async def test_health_answers_before_metrics_have_seen_a_step() -> None:
    async with lift(start=False) as server:
        assert await server.metric("engine_steps_total") == 0
        assert error_of(await server.client.post("/health"), 405)
