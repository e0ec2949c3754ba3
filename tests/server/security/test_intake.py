"""Limits of each client, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest

from chairlift.server.security.intake import _network
from chairlift.server.security.keys import KeySources
from chairlift.server.security.rates import RateSettings
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, MODEL, Lift, chat_body, error_of, lift, on_socket
from tests.server.security.keyring import ALICE, BOB, ROOT, SOURCES, bearer, secured


def limited(keys: KeySources = SOURCES, **limits: int) -> ServerSettings:
    return secured(keys, rates=RateSettings(**limits))


async def ask(server: Lift, secret: str | None = ALICE, path: str = CHAT, **body: Any) -> httpx.Response:
    headers = {} if secret is None else bearer(secret)
    return await server.client.post(path, json=chat_body(**body), headers=headers)


async def test_requests_within_a_minute() -> None:
    async with lift(FakeRunner(answering("a")), settings=limited(requests_per_minute=2)) as server:
        first = await ask(server)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert (await ask(server, temperature=9)).status_code == 400  # it counts
        refused = await ask(server)
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 55 <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(server, BOB)).status_code == 200
        for _ in range(4):
            assert (await ask(server, ROOT)).status_code == 200
            assert (await server.client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await ask(server, "sk-nobody-0000")).status_code == 401


async def test_anthropics_surface_has_its_own_headers() -> None:
    settings = limited(requests_per_minute=1, tokens_per_minute=1000)
    async with lift(FakeRunner(answering("a")), settings=settings) as server:
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        first = await server.client.post("/v1/messages", json=body, headers=bearer(ALICE))
        assert first.status_code == 200
        assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert first.headers["anthropic-ratelimit-tokens-limit"] == "1000"
        datetime.fromisoformat(first.headers["anthropic-ratelimit-requests-reset"])
        refused = await server.client.post("/v1/messages", json=body, headers=bearer(ALICE))
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_tokens_of_prompts_and_answers_count() -> None:
    async with lift(FakeRunner(answering("abc")), settings=limited(tokens_per_minute=1000)) as server:
        spent = 0
        for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 2}):
            response = await ask(server, **more)
            assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - spent)
            if "stream" in more:
                spent += int(response.text.rpartition('"total_tokens":')[2].partition(",")[0].rstrip("}\n "))
            else:
                spent += response.json()["usage"]["total_tokens"]
        assert (await ask(server)).headers["x-ratelimit-remaining-tokens"] == str(1000 - spent)


async def test_when_the_tokens_are_spent_nothing_is_admitted() -> None:
    async with lift(FakeRunner(answering("abc")), settings=limited(tokens_per_minute=1)) as server:
        assert (await ask(server)).status_code == 200
        error = error_of(await ask(server), 429)
        assert error["code"] == "rate_limit_exceeded" and "tokens" in str(error["message"])


async def begun(server: Lift, count: int, **body: Any) -> list[asyncio.Task[httpx.Response]]:
    """Requests that have rows, before a step of them comes back."""
    server.runner.close_gate()
    tasks = [asyncio.create_task(ask(server, **body)) for _ in range(count)]
    async with asyncio.timeout(10):
        while server.engine.stats().running + server.engine.stats().waiting < count:
            await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_at_once(stream: bool) -> None:
    async with lift(FakeRunner(answering("a")), settings=limited(concurrent=2)) as server:
        tasks = await begun(server, 2, stream=stream)
        refused = await ask(server)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        server.runner.open_gate()
        assert [(await task).status_code for task in tasks] == [200, 200]
        assert (await ask(server)).status_code == 200


async def test_a_client_that_leaves_makes_room() -> None:
    async with lift(FakeRunner(answering("a")), settings=limited(concurrent=1)) as server:
        (task,) = await begun(server, 1)
        task.cancel()
        server.runner.open_gate()
        await server.until_idle()
        assert (await ask(server)).status_code == 200


async def test_answers_in_the_background_count_until_they_end() -> None:
    async with lift(FakeRunner(answering("a")), settings=limited(concurrent=1)) as server:
        server.runner.close_gate()
        body = {"model": MODEL, "input": "Hi", "background": True}
        begin = await server.client.post("/v1/responses", json=body, headers=bearer(ALICE))
        assert begin.status_code == 200
        assert (await ask(server)).status_code == 429
        server.runner.open_gate()
        await server.until_idle()
        assert (await ask(server)).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/cancel"), ("DELETE", "")])
async def test_whoever_has_no_room_left_may_make_some(method: str, path: str) -> None:
    settings = limited(concurrent=1, requests_per_minute=2)
    async with lift(FakeRunner(), settings=settings) as server:  # whose answers do not end by themselves
        body = {"model": MODEL, "input": "Hi", "background": True}
        begin = await server.client.post("/v1/responses", json=body, headers=bearer(ALICE))
        assert (await ask(server)).status_code == 429
        place = f"/v1/responses/{begin.json()['id']}{path}"
        assert (await server.client.request(method, place, headers=bearer(ALICE))).status_code == 200
        await server.until_idle()
        assert (await ask(server, max_tokens=1)).status_code == 200


async def test_without_keys_addresses_are_counted() -> None:
    settings = limited(KeySources(), requests_per_minute=1)
    async with lift(FakeRunner(answering("a")), settings=settings) as server:
        statuses = []
        for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
            transport = httpx.ASGITransport(server.app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                statuses.append((await client.post(CHAT, json=chat_body())).status_code)
    assert statuses == [200, 429, 200]


def test_one_place_is_one_network() -> None:
    assert _network("2001:db8::1") == _network("2001:db8::ffff:1") != _network("2001:db8:0:1::1")
    assert _network("::ffff:10.0.0.1") == "10.0.0.1" != _network("::ffff:10.0.0.2")
    assert _network("10.0.0.1") == "10.0.0.1" and _network("unix") == "unix"


async def test_openais_client_sees_the_limits() -> None:
    settings = limited(requests_per_minute=1)
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with (
        lift(FakeRunner(answering("a")), settings=settings) as server,
        on_socket(server.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as client,
    ):
        make = client.chat.completions.with_raw_response.create
        raw = await make(model=MODEL, messages=messages)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refused:
            await make(model=MODEL, messages=messages)
        assert int(refused.value.response.headers["retry-after"]) > 50


@asynccontextmanager
async def half_sent(server: Lift, count: int, size: int, **headers: str) -> AsyncIterator[None]:
    """Bodies of which all but the last byte has come."""
    hold, held = asyncio.Event(), 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal held
        yield b"x" * (size - 1)
        held += 1  # the first part is counted
        await hold.wait()
        yield b"x"

    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        tasks = [asyncio.create_task(client.post(CHAT, content=body())) for _ in range(count)]
        async with asyncio.timeout(10):
            while held < count:
                await asyncio.sleep(0)
        yield
        hold.set()
        assert [(await task).status_code for task in tasks] == [400] * count


async def test_the_bodies_in_memory_are_bounded() -> None:
    """Eight of the largest size; what is refused is free again, and what is answered."""
    settings = replace(ServerSettings(), max_body_bytes=1000)
    async with lift(FakeRunner(answering("a")), settings=settings) as server:
        async with half_sent(server, 8, 1000):
            assert error_of(await ask(server), 429)["code"] == "queue_full"
        assert (await ask(server)).status_code == 200


async def test_the_bodies_of_one_key_leave_room_for_those_of_others() -> None:
    settings = secured(settings=replace(ServerSettings(), max_body_bytes=1000))
    async with lift(FakeRunner(answering("a")), settings=settings) as server:
        async with half_sent(server, 6, 1000, **bearer(ALICE)):
            assert error_of(await ask(server), 429)["code"] == "queue_full"
            assert (await ask(server, BOB)).status_code == 200
            assert (await ask(server, ROOT)).status_code == 200
        assert (await ask(server)).status_code == 200
