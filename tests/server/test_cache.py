"""`DELETE /v1/cache` and `POST /v1/cache/warm`, and `chairlift warm`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.server.cli.app import run
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, error_of, lift, on_socket
from tests.server.security.keyring import ALICE, ROOT, secured

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


SYSTEM = {"role": "system", "content": "You are terse. " * 10}


@pytest.mark.parametrize("spec", [SPEC, PrefixSpec(8, 4, checkpoint_bytes=200)], ids=["all", "states"])
async def test_what_is_warmed_stays_whatever_comes(spec: PrefixSpec) -> None:
    config = EngineConfig(prefix_cache_bytes=3000)
    async with lift(FakeRunner(answering("b")), config=config, prefix=spec) as server:
        warmed = (await server.client.post("/v1/cache/warm", json={"messages": [SYSTEM]})).json()
        tokens = len(server.tokenizer.apply_chat_template([SYSTEM], add_generation_prompt=False))
        assert warmed["tokens"] == warmed["pinned_tokens"] == tokens
        assert warmed["pinned_bytes"] == await server.metric("prefix_cache_pinned_bytes")
        assert tokens * 4 <= warmed["pinned_bytes"] < tokens * 4 + 32 + spec.checkpoint_bytes
        for number in range(20):
            await server.complete(prompt=chr(65 + number) * 300)
        assert await server.metric("prefix_cache_evictions_total") > 0
        answer = (await server.chat(messages=[SYSTEM, {"role": "user", "content": "Why?"}])).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens
        again = (await server.client.post("/v1/cache/warm", json={"messages": [SYSTEM]})).json()
        assert again == warmed
        await server.client.delete("/v1/cache")
        assert await server.metric("prefix_cache_pinned_bytes") == 0


async def test_a_warmed_text_is_for_its_salt_alone() -> None:
    config = EngineConfig(prefix_cache_bytes=10**6)
    async with lift(FakeRunner(answering("b")), config=config, prefix=SPEC) as server:
        body = {"prompt": PROMPT, "cache_salt": "one", "model": "org/fake"}
        assert (await server.client.post("/v1/cache/warm", json=body)).json()["pinned_tokens"] == 100
        counts = []
        for salt in (None, "one"):
            answer = (await server.complete(prompt=PROMPT + "?", cache_salt=salt)).json()
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert counts == [0, 100]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "messages": [SYSTEM]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "max_tokens": 3}, "max_tokens"),
        ({"prompt": "a", "cache_salt": "s" * 513}, "cache_salt"),
        ({"prompt": "a" * 500}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
    ],
)
async def test_what_cannot_be_warmed_is_refused(body: JSON, param: str) -> None:
    config = EngineConfig(prefix_cache_bytes=2000)
    async with lift(FakeRunner(answering("b")), config=config, prefix=SPEC) as server:
        refused = await server.client.post("/v1/cache/warm", json=body)
        assert error_of(refused, 400)["param"] == param
        assert await server.metric("prefix_cache_pinned_bytes") == 0


async def test_a_server_that_keeps_nothing_warms_nothing() -> None:
    async with lift() as server:
        refused = await server.client.post("/v1/cache/warm", json={"prompt": "a"})
    assert "keeps no prefixes" in str(error_of(refused, 400)["message"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("system.txt", "You are terse. " * 10),
        ("system.json", json.dumps([SYSTEM])),
        ("chat.json", json.dumps({"messages": [SYSTEM], "cache_salt": "x"})),
    ],
)
async def test_the_command_warms_a_running_server(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    config = EngineConfig(prefix_cache_bytes=10**6)
    async with (
        lift(FakeRunner(answering("b")), config=config, prefix=SPEC) as server,
        on_socket(server.app) as url,
    ):
        assert await asyncio.to_thread(run, ["warm", str(tmp_path / name), "--url", url]) == 0
        assert await server.metric("prefix_cache_pinned_bytes") >= 600
    kept, of = re.findall(r"[0-9]+", capsys.readouterr().out)
    assert kept == of


async def test_the_command_brings_an_admins_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.txt").write_text("You are terse.")
    command = ["warm", str(tmp_path / "system.txt"), "--url"]
    async with (
        lift(config=EngineConfig(prefix_cache_bytes=10**6), prefix=SPEC, settings=secured()) as server,
        on_socket(server.app) as url,
    ):
        for key, code, said in ((None, 1, "API key is needed"), (ALICE, 1, "admin's key"), (ROOT, 0, "kept")):
            more = [] if key is None else ["--admin-key", key]
            assert await asyncio.to_thread(run, [*command, url, *more]) == code
            assert said in "".join(capsys.readouterr())
        monkeypatch.setenv("CHAIRLIFT_ADMIN_KEY", f"root:{ROOT},{ALICE}")
        assert await asyncio.to_thread(run, [*command, url]) == 0
        assert await asyncio.to_thread(run, [*command, url, "--admin-key", "short"]) == 1


async def test_the_command_says_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.json").write_text("{")
    async with lift() as server, on_socket(server.app) as url:
        for file, word in (("empty.txt", "no tokens"), ("bad.json", "cannot be read")):
            assert await asyncio.to_thread(run, ["warm", str(tmp_path / file), "--url", url]) == 1
            assert word in capsys.readouterr().err
    assert await asyncio.to_thread(run, ["warm", str(tmp_path / "empty.txt"), "--url", url]) == 1
    assert "does not answer" in capsys.readouterr().err
