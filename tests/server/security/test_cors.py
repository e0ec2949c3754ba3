"""Pages that may read answers."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, chat_body, lift, on_socket, sse
from tests.server.security.keyring import ALICE, bearer, secured

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_a_preflight_needs_no_key() -> None:
    async with lift(settings=secured(cors_origins=(PAGE,))) as server:
        response = await server.client.options(CHAT, headers=PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "access-control-allow-credentials" not in response.headers
        other = await server.client.options(CHAT, headers={**PREFLIGHT, "Origin": "https://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


async def test_without_the_option_pages_read_nothing() -> None:
    async with lift(FakeRunner(answering("a")), settings=secured()) as server:
        assert (await server.client.options(CHAT, headers=PREFLIGHT)).status_code == 401
        headers = {"Origin": PAGE, **bearer(ALICE)}
        response = await server.client.post(CHAT, json=chat_body(), headers=headers)
        assert response.status_code == 200 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_answers_and_refusals_can_be_read(origins: tuple[str, ...]) -> None:
    async with lift(FakeRunner(answering("a")), settings=secured(cors_origins=origins)) as server:
        for headers, body, status in (
            (bearer(ALICE), chat_body(), 200),
            ({}, chat_body(), 401),
            (bearer(ALICE), chat_body(temperature=9), 400),
        ):
            response = await server.client.post(CHAT, json=body, headers={"Origin": PAGE, **headers})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] in (PAGE, "*")
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert "x-request-id" in exposed and "x-request-id" in response.headers


async def test_a_failure_can_be_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lift(settings=secured(cors_origins=(PAGE,))) as server:
        with monkeypatch.context() as broken:
            broken.delattr(server.app.state, "context")
            response = await server.client.get("/v1/models", headers={"Origin": PAGE, **bearer(ALICE)})
        assert response.status_code == 500 and response.headers["access-control-allow-origin"] == PAGE


async def test_a_stream_comes_as_it_is_made() -> None:
    """The first chunk is read while the model has not drawn the last token."""
    runner = FakeRunner(answering("bonjour"))
    settings = secured(cors_origins=(PAGE,), allowed_hosts=("*",))
    async with lift(runner, settings=settings) as server, on_socket(server.app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            request = client.build_request(
                "POST", CHAT, json=chat_body(stream=True), headers={"Origin": PAGE, **bearer(ALICE)}
            )
            runner.close_gate()
            response = await client.send(request, stream=True)
            lines = response.aiter_lines()
            first = await anext(lines)
            assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
            runner.open_gate()
            rest = "\n".join([first] + [line async for line in lines]) + "\n"
            await response.aclose()
        texts = [json.loads(data)["choices"][0]["delta"].get("content") or "" for _, data in sse(rest)[:-1]]
        assert "".join(texts) == "bonjour"
