"""`x-request-id`, in and out."""

from __future__ import annotations

import logging

import pytest

from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, MODEL, chat_body, lift
from tests.server.observe.reading import LOGGING, request_lines


@pytest.mark.parametrize("given", ["a", "trace-1/2:3", "0" * 128, "8f14e45f+ceea@167a=="])
async def test_a_clients_own_id_is_kept(given: str) -> None:
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        with request_lines() as seen:
            for path, body in ((CHAT, chat_body()), (CHAT, {}), ("/nowhere", {})):
                answer = await server.client.post(path, json=body, headers={"X-Request-Id": given})
                assert answer.headers.get_list("x-request-id") == [given]
    assert [line["request_id"] for line in seen.lines] == [given] * 3
    assert str(seen.lines[0]["answer_id"]).startswith("chatcmpl-")


@pytest.mark.parametrize("given", ["", "0" * 129, "a b", "a\tb", "<a>", '"', "é"])
async def test_one_that_is_not_fit_is_replaced(given: str) -> None:
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        with request_lines() as seen:
            headers = [(b"x-request-id", given.encode())]
            answer = await server.client.post(CHAT, json=chat_body(), headers=headers)
    assert answer.headers["x-request-id"] == answer.json()["id"] == seen.lines[0]["request_id"]


async def test_every_answer_has_one() -> None:
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/metrics", "/openapi.json", "/nowhere"):
            with request_lines(logging.DEBUG) as seen:
                answer = await server.client.get(path)
            assert answer.headers["x-request-id"] == seen.lines[0]["request_id"], path


async def test_anthropics_is_in_the_log() -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        with request_lines() as seen:
            answer = await server.client.post("/v1/messages", json=body)
            refused = await server.client.post("/v1/messages", json={})
    first, second = seen.lines
    assert first["request_id"] == answer.headers["request-id"]
    assert first["answer_id"] == answer.json()["id"] == answer.headers["x-request-id"]
    assert second["request_id"] == refused.json()["request_id"] == refused.headers["x-request-id"]
