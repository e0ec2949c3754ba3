"""/metrics and /health, as Prometheus and an operator read them."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.request import Request
from chairlift.server.metrics import ServerMetrics
from chairlift.server.metrics.exposition import exposition
from chairlift.server.settings import ServerSettings
from tests.fakes import KV_BYTES_PER_TOKEN, FakeRunner, Fault, all_rows, answering, fake_model
from tests.server.harness import MODEL, Lift, error_of, lift


async def families(server: Lift) -> dict[str, Metric]:
    """Of the scrape, by name."""
    text = (await server.client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_the_scrape_is_plain_text() -> None:
    accept = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"
    async with lift(FakeRunner(answering("abc"))) as server:
        response = await server.client.get("/metrics", headers={"Accept": accept})
        found = await families(server)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert not [name for name in found if name.endswith("_created")]
    foreign = {name for name in found if not name.startswith("chairlift_")}
    assert all(name.startswith("process_") for name in foreign), foreign


async def test_labels() -> None:
    """What is of a model says of which; what is not says nothing of models."""
    async with lift(FakeRunner(answering("abc"))) as server:
        await server.complete()
        found = await families(server)
    shared = ("chairlift_http_", "chairlift_requests_", "chairlift_process_", "chairlift_build_", "process_")
    for name, family in found.items():
        models = {sample.labels.get("model_name") for sample in family.samples}
        assert models <= {None} or (models == {MODEL} and not name.startswith(shared)), name


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
        assert await server.metric("request_params_max_tokens_sum") == 16 + 2 + 2 + 16
        assert await server.metric("request_time_per_output_token_seconds_count") == 3
        assert await server.metric("request_inference_time_seconds_count") == 3
        assert await server.metric("request_prefill_kv_computed_tokens_sum") == 8
        assert await server.metric("prompt_tokens_cached_total") == 0
        assert await server.metric('prompt_tokens_by_source_total{source="local_compute"}') == 8
        assert await server.metric("step_duration_seconds_count") == await server.metric(
            "iteration_tokens_count"
        )
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
    one, two = ServerMetrics(), ServerMetrics()
    one.model("a").on_token_interval(1.0)
    name, labels = "chairlift_generation_tokens_total", {"model_name": "a"}
    assert one.registry.get_sample_value(name, labels) == 1
    assert two.registry.get_sample_value(name, labels) is None


async def test_models_of_a_process_are_told_apart() -> None:
    metrics = ServerMetrics()
    engines = {}
    for name in ("a", "b"):
        engines[name] = Engine(fake_model(name=name), observer=metrics.model(name))
        metrics.model(name).watch(engines[name])
    await engines["a"].start()
    try:
        text = exposition(metrics.registry).decode()
    finally:
        await engines["a"].stop()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    ready = {sample.labels["model_name"]: sample.value for sample in found["chairlift_model_ready"].samples}
    assert ready == {"a": 1, "b": 0}
    assert len(found) == len(set(found)) and text.count("# TYPE chairlift_model_ready ") == 1
    metrics.model("b").watch(None)
    text = exposition(metrics.registry).decode()
    assert 'chairlift_model_ready{model_name="a"} 0.0' in text  # it has stopped
    assert 'chairlift_model_ready{model_name="b"}' not in text
    assert 'chairlift_generation_tokens_total{model_name="b"} 0.0' in text


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
            unready = await server.client.get("/health/ready")
            assert (unready.status_code, unready.json()["status"]) == (503, "stalled")
            server.runner.open_gate()
        await server.until_idle()
        assert (await server.client.get("/health")).status_code == 200


async def test_health_answers_before_metrics_have_seen_a_step() -> None:
    async with lift(start=False) as server:
        assert await server.metric("engine_steps_total") == 0
        assert error_of(await server.client.post("/health"), 405)
