"""A stream that fails after its first bytes, on every surface: an error in the surface's form, then the end,
and the request counts as failed."""

from __future__ import annotations

import json
import re

import pytest

from chairlift.engine.events import TextDelta
from chairlift.engine.output.events import ContentDelta, OutputEvent
from chairlift.engine.output.formats import OutputFormat
from chairlift.engine.output.plain import PlainParser
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import CHAT, COMPLETIONS, JSON, MODEL, Lift, lift, sse

MESSAGE: JSON = {"role": "user", "content": "Hi"}
BODIES: dict[str, JSON] = {
    CHAT: {"messages": [MESSAGE]},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 50},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}


async def failing(server: Lift, path: str) -> list[tuple[str, JSON]]:
    """Events of an answer whose third step goes wrong; the last one is the error."""
    faults = iter((None, None, None, Fault(fail=all_rows)))
    server.runner.fault = lambda plan: next(faults, None)
    response = await server.client.post(path, json={"model": MODEL, "stream": True, **BODIES[path]})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in response.text
    return [(event, json.loads(data)) for event, data in sse(response.text)]


@pytest.mark.parametrize("path", list(BODIES))
async def test_the_error_is_in_the_surfaces_form_and_counts(path: str) -> None:
    async with lift(FakeRunner(answering("abcdefgh"))) as server:
        *events, (name, last) = await failing(server, path)
        await server.until_idle()
        assert await server.metric('request_success_total{finished_reason="error"}') == 1
        assert await server.metric('request_success_total{finished_reason="abort"}') == 0
        assert server.engine.stats().running == 0
        # The next answer is whole.
        whole = await server.client.post(path, json={"model": MODEL, **BODIES[path]})
        assert whole.status_code == 200 and "abcdefgh" in whole.text
    assert re.search(r'"ab?c?"', json.dumps(events))
    if path == "/v1/messages":
        assert name == last["type"] == "error"
        assert last["error"] == {"type": "api_error", "message": "The fake failed this row."}
        assert str(last["request_id"]).startswith("req_")
        assert "message_stop" not in dict(events)
    elif path == "/v1/responses":
        assert name == last["type"] == "response.failed"
        response = last["response"]
        assert isinstance(response, dict) and response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "The fake failed this row."}
        assert "response.completed" not in dict(events)
    else:
        assert name == "error"
        error = last["error"]
        assert isinstance(error, dict) and (error["type"], error["code"]) == ("server_error", "engine_error")
        choices = [choice for _, chunk in events for choice in chunk["choices"]]  # type: ignore[attr-defined]
        assert {choice["finish_reason"] for choice in choices} == {None}


@pytest.mark.parametrize("path", list(BODIES))
async def test_without_a_stream_it_is_a_500_in_the_surfaces_form(path: str) -> None:
    async with lift(FakeRunner(answering("abcdefgh"))) as server:
        server.runner.fail_next(Fault(fail=all_rows))
        response = await server.client.post(path, json={"model": MODEL, **BODIES[path]})
        assert response.status_code == 500, response.text
        assert response.json()["error"]["message"] == "The fake failed this row."
        assert response.json().get("type") == ("error" if path == "/v1/messages" else None)
        assert await server.metric('request_success_total{finished_reason="error"}') == 1


def unforeseen(parser: PlainParser, delta: TextDelta) -> list[OutputEvent]:
    """Nobody can read an answer beyond its third character."""
    if "c" in delta.text:
        raise RuntimeError("secret")
    return [ContentDelta(delta.text)]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [True, False])
async def test_what_nobody_foresaw_counts_as_failed(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OutputFormat, "parser", lambda self, **settings: PlainParser())
    monkeypatch.setattr(PlainParser, "feed", unforeseen)
    async with lift(FakeRunner(answering("abcdefgh" * 100))) as server:
        body = {"model": MODEL, "stream": stream, **BODIES[path]}
        response = await server.client.post(path, json=body)
        await server.until_idle()
        assert response.status_code == (200 if stream else 500), response.text
        assert "had an error" in response.text and "secret" not in response.text
        assert "secret" in caplog.text
        assert await server.metric('request_success_total{finished_reason="error"}') == 1
        assert await server.metric('request_success_total{finished_reason="abort"}') == 0
        assert server.runner.rows == {}
