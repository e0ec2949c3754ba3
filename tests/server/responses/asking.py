"""Asking `/v1/responses`, and reading what comes back with the types of OpenAI's SDK."""

from __future__ import annotations

import json
from typing import get_args

import httpx
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.fake_tokenizer import FakeTokenizer
from tests.server.harness import JSON, MODEL, Lift, sse

RESPONSES = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
EVENTS: dict[str, type[BaseModel]] = {
    get_args(event.model_fields["type"].annotation)[0]: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
}
ITEM: TypeAdapter[object] = TypeAdapter(ResponseItem)


def body(**more: object) -> JSON:
    return {"model": MODEL, "input": "Hi", "temperature": 0, **more}


async def respond(server: Lift, **more: object) -> httpx.Response:
    return await server.client.post(RESPONSES, json=body(**more))


async def response_of(server: Lift, **more: object) -> JSON:
    """A response that was made, whole, and is one in the SDK's eyes."""
    answer = await respond(server, **more)
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def checked(response: JSON) -> JSON:
    Response.model_validate(response)
    return response


def checked_item(item: JSON) -> JSON:
    ITEM.validate_python(item)
    return item


def checked_events(events: list[JSON]) -> list[JSON]:
    """In the SDK's eyes each is one, they are numbered from 0, and they begin and end as they should."""
    for number, event in enumerate(events):
        kind = event["type"]
        assert isinstance(kind, str)
        EVENTS[kind].model_validate(event)
        assert event["sequence_number"] == number
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ENDS and not set(ENDS) & set(kinds[:-1])
    return events


def events_of(response: httpx.Response) -> list[JSON]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    named = [(name, json.loads(data)) for name, data in sse(response.text)]
    assert all(name == event["type"] for name, event in named)
    return checked_events([event for _, event in named])


async def stream_of(server: Lift, **more: object) -> list[JSON]:
    return events_of(await respond(server, stream=True, **more))


class Recorder(FakeTokenizer):
    """Remembers the messages that it rendered."""

    def __init__(self, template: str = "") -> None:
        super().__init__(template=template)
        self.conversations: list[list[JSON]] = []

    def apply_chat_template(
        self,
        messages: list[JSON],
        *,
        tools: list[JSON] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        self.conversations.append(messages)
        return super().apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
