"""Prometheus and promtool read what is there for them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.settings import ServerSettings
from tests.docker.tools import DOCKER, passes, tool
from tests.fakes import FakeRunner, answering
from tests.server.embedding_harness import embedding_lift
from tests.server.harness import COMPLETIONS, MODEL, completion_body, lift, on_socket

PROMETHEUS = DOCKER / "prometheus"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "chairlift.json"
STARTS_S = 30


@pytest.mark.parametrize(
    ("command", "file"),
    [("check config", "prometheus.yaml"), ("check rules", "rules.yaml"), ("test rules", "rules.test.yaml")],
)
def test_promtool_has_nothing_to_say(command: str, file: str) -> None:
    passes(tool("promtool"), *command.split(), str(PROMETHEUS / file))


async def scrape() -> str:
    async with embedding_lift(runner=FakeRunner(answering("abc"))) as server:
        await server.embed("Hi")
        await server.client.post(COMPLETIONS, json=completion_body())
        await server.client.post(COMPLETIONS, json={})
        metrics = server.app.state.context.metrics
        metrics.http.ended(COMPLETIONS, "POST", 499, 0.0, left=True)
        return (await server.client.get("/metrics")).text


async def test_promtool_finds_no_fault_with_the_metrics() -> None:
    passes(tool("promtool"), "check", "metrics", given=await scrape())


def expressions() -> dict[str, str]:
    """Of rules and panels, by where they stand."""
    rules = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"]}
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"]:
        found[variable["name"]] = variable["query"]["query"]
    return found


async def test_every_metric_that_is_asked_for_exists() -> None:
    families = list(text_string_to_metric_families(await scrape()))
    samples = {sample.name for family in families for sample in family.samples}
    asked = set(re.findall(r"\bchairlift_\w+", " ".join(expressions().values())))
    assert len(asked) > 40
    assert asked <= samples, asked - samples


def test_every_expression_can_be_read(tmp_path: Path) -> None:
    """As rules: promtool has no other way to check an expression."""
    rules = [
        {
            "record": f"a:{number}",
            "expr": expression.replace("$__rate_interval", "5m").replace("$model", ".*"),
        }
        for number, (name, expression) in enumerate(expressions().items())
        if name != "model"
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    passes(tool("promtool"), "check", "rules", "--lint=none", str(file))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus with our configuration and rules, which reads from there every second."""
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(PROMETHEUS / "rules.yaml")]
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}/api/v1", timeout=STARTS_S) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, object]]:
    """The result of a query; empty while Prometheus starts or has not read anything."""
    try:
        answer = await client.get("/query", params={"query": query})
    except httpx.ConnectError:
        return []
    return list(answer.json()["data"]["result"]) if answer.status_code == 200 else []


async def until(client: httpx.AsyncClient, query: str) -> dict[str, object]:
    async with asyncio.timeout(STARTS_S):
        while not (found := await ask(client, query)):
            await asyncio.sleep(0.1)
    (one,) = found
    return one


async def test_prometheus_reads_a_running_server(tmp_path: Path) -> None:
    tool("prometheus")
    settings = ServerSettings(observe=ObserveSettings(vllm_names=True))
    async with lift(FakeRunner(answering("abc")), settings=settings) as server, on_socket(server.app) as url:
        await server.complete(prompt=["1", "23"])
        async with prometheus(tmp_path, url.removeprefix("http://")) as client:
            up = await until(client, 'up{job="chairlift"} == 1')
            for name in ("chairlift_generation_tokens_total", "vllm:generation_tokens_total"):
                tokens = await until(client, name)
                assert tokens["metric"]["model_name"] == MODEL and tokens["value"][1] == "8"  # type: ignore[index]
            median = "histogram_quantile(0.5, chairlift_request_prompt_tokens_bucket)"
            assert 1 <= float((await until(client, median))["value"][1]) <= 2  # type: ignore[index]
            rules = (await client.get("/rules")).json()["data"]["groups"]
            health = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
            assert len(health) == 8 and set(health.values()) <= {"ok", "unknown"}
            assert up["metric"]["instance"] == url.removeprefix("http://")  # type: ignore[index]
