"""`DELETE /v1/cache`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.plan import PrefixSpec
from tests.fakes import FakeRunner, answering
from tests.server.harness import error_of, lift

SPEC = PrefixSpec(block_tokens=8, bytes_per_token=4)
PROMPT = "a" * 100


async def test_what_is_cleared_is_computed_again(tmp_path: Path) -> None:
    config = EngineConfig(
        prefix_cache_bytes=10**6, prefix_cache_disk_bytes=10**6, prefix_cache_folder=tmp_path
    )
    runner = FakeRunner(answering("b"))
    async with lift(runner, config=config, prefix=SPEC) as server:

        async def cached() -> int:
            answer = (await server.complete(prompt=PROMPT)).json()
            count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert isinstance(count, int)
            return count

        assert [await cached(), await cached()] == [0, 99]
        await server.until_idle()
        assert server.engine._disk is not None and server.engine._disk.disk.settle(10)
        kept = await server.metric("prefix_cache_bytes")
        cleared = await server.client.delete("/v1/cache")
        assert cleared.json() == {"object": "cache.cleared", "memory_bytes": kept, "disk_bytes": 0}
        assert runner.pages == {} and runner.plans[-1].tidy
        assert await server.metric("prefix_cache_bytes") == 0
        assert await cached() == 96, "the disk has it"
        await server.until_idle()
        written = await server.metric("prefix_cache_disk_bytes")
        cleared = await server.client.delete("/v1/cache", params={"disk": "true"})
        assert cleared.json()["disk_bytes"] == written > 0
        assert list(tmp_path.rglob("*.safetensors")) == []
        assert [await cached(), await cached()] == [0, 99]


async def test_running_requests_go_on() -> None:
    runner = FakeRunner(answering("b" * 50))
    config = EngineConfig(prefix_cache_bytes=10**6)
    async with lift(runner, config=config, prefix=SPEC) as server:
        await server.complete(prompt=PROMPT)
        await server.until_idle()
        runner.close_gate()
        running = asyncio.create_task(server.complete(prompt=PROMPT, max_tokens=60))
        await runner.at_gate()
        await runner.let_through(5)
        clearing = asyncio.create_task(server.client.delete("/v1/cache"))
        await runner.let_through()
        runner.open_gate()
        assert (await clearing).status_code == 200
        assert (await running).json()["choices"][0]["text"] == "b" * 50
        assert runner.pages == {}


@pytest.mark.parametrize(("query", "param"), [({"disk": "yes"}, "disk"), ({"disks": "true"}, "disks")])
async def test_what_is_not_understood_clears_nothing(query: dict[str, str], param: str) -> None:
    async with lift(FakeRunner(), config=EngineConfig(prefix_cache_bytes=10**6), prefix=SPEC) as server:
        await server.complete(prompt=PROMPT)
        refused = await server.client.delete("/v1/cache", params=query)
        assert error_of(refused, 400)["param"] == param
        assert await server.metric("prefix_cache_bytes") > 0


async def test_a_server_that_keeps_nothing_has_nothing_to_clear() -> None:
    async with lift() as server:
        cleared = await server.client.delete("/v1/cache?disk=true")
    assert cleared.json() == {"object": "cache.cleared", "memory_bytes": 0, "disk_bytes": 0}


async def test_not_before_the_model_is_there() -> None:
    async with lift(start=False) as server:
        assert (await server.client.delete("/v1/cache")).status_code == 503
