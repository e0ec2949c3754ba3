"""Requests of Anthropic's form, and their refusals."""

from __future__ import annotations

import json

import httpx

from tests.server.harness import MODEL, Lift, sse

MESSAGES_PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

JSON = dict[str, object]


async def ask(server: Lift, path: str = MESSAGES_PATH, **more: object) -> httpx.Response:
    """Null in `more` is sent as null; without `max_tokens` on `count_tokens`."""
    body: JSON = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    if path == MESSAGES_PATH:
        body |= {"max_tokens": 100, "temperature": 0}
    return await server.client.post(path, json={**body, **more})


def refusal(response: httpx.Response, status: int) -> JSON:
    """The error in Anthropic's envelope, checked for its form."""
    assert response.status_code == status, response.text[:300]
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert body["request_id"].startswith("req_")
    assert set(body["error"]) - {"details"} == {"type", "message"}
    assert body["error"]["message"]
    return dict(body["error"])


def events_of(response: httpx.Response) -> list[JSON]:
    """The events of a stream, each named as its type says; pings left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [(name, json.loads(data)) for name, data in sse(response.text)]
    assert all(name == data["type"] for name, data in events)
    return [data for name, data in events if name != "ping"]
