"""`/openapi.json` says what the code does; `/docs` shows it and loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from chairlift.server.openapi.answers import (
    AnthropicError,
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    Error,
    Health,
    Ready,
    Tokens,
)
from chairlift.server.openapi.document import BOUNDS, openapi
from chairlift.server.openapi.items import (
    AnthropicMessage,
    Deleted,
    InputItems,
    ResponseObject,
    TokenCount,
)
from chairlift.server.openapi.operations import OPERATIONS
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.parameters import CHAT
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, MODEL, Lift, lift, sse

DOCUMENT = openapi("t", "1")
TOOL: JSON = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<think>\nhm</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
THINKS = FakeTokenizer(template="<think></think><tool_call>")


async def test_every_route_is_described() -> None:
    async with lift() as server:
        found = get_openapi(title="t", version="1", routes=server.app.routes)["paths"]
        routes = {(method, path) for path, methods in found.items() for method in methods}
        served = (await server.client.get("/openapi.json")).json()
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
    assert served["paths"] == DOCUMENT["paths"] and served["components"] == DOCUMENT["components"]
    assert served["info"]["title"] == "Chairlift"


def schema_of(body: type[BaseModel]) -> dict[str, Any]:
    schema = DOCUMENT["components"]["schemas"][body.__name__]
    assert isinstance(schema, dict)
    return schema


def test_bodies_hold_all_that_is_accepted_and_nothing_else() -> None:
    for operation in OPERATIONS:
        if operation.body is None:
            continue
        described = DOCUMENT["paths"][operation.path][operation.method]["requestBody"]["content"]
        name = described["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = DOCUMENT["components"]["schemas"][name]
        assert operation.surface is not None and schema["additionalProperties"] is False
        fields = {field.alias or name for name, field in operation.body.model_fields.items()}
        assert set(schema["properties"]) == fields | set(operation.surface.neutral)
        for name in set(operation.surface.neutral) - fields:
            assert schema["properties"][name]["enum"] == [None, *operation.surface.neutral[name]]
    assert schema_of(ChatRequest)["required"] == ["model", "messages"]
    assert schema_of(ChatRequest)["properties"]["audio"]["enum"] == [None, *CHAT.neutral["audio"]]


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    names = set(re.findall(r'"#/components/schemas/(.*?)"', text))
    assert names <= set(DOCUMENT["components"]["schemas"])
    assert "chairlift__" not in text


@pytest.mark.parametrize("name", sorted(BOUNDS))
async def test_bounds_are_those_of_the_code(name: str) -> None:
    bounds = BOUNDS[name]
    async with lift(FakeRunner(answering("a"))) as server:

        async def status(value: object) -> int:
            if name == "max_output_tokens":
                body: JSON = {"model": MODEL, "input": "a", name: value}
                return (await server.client.post("/v1/responses", json=body)).status_code
            return (await server.chat(**{"max_tokens": 1, name: value} if name != "max_completion_tokens" else {name: value})).status_code  # fmt: skip  # noqa: E501

        for key, step in (("minimum", -1), ("maximum", 1)):
            if key in bounds and name != "min_tokens":
                assert await status(bounds[key]) == 200
            if key in bounds:
                assert await status(bounds[key] + step) == 400
        if "exclusiveMinimum" in bounds:
            assert await status(bounds["exclusiveMinimum"]) == 400
            assert await status(bounds["exclusiveMinimum"] + 0.01) == 200


def test_completions_may_be_nothing_but_an_echo() -> None:
    """As tests/server/test_echo.py has it."""
    number, _ = schema_of(CompletionRequest)["properties"]["max_tokens"]["anyOf"]
    assert (number["type"], number["minimum"]) == ("integer", 0)


def check(model: type[BaseModel], payload: object) -> None:
    model.model_validate_json(json.dumps(payload), strict=True)


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"tools": [TOOL]}, {"n": 2}])
async def test_chat_answers(more: JSON) -> None:
    async with lift(FakeRunner(answering(CALL)), tokenizer=THINKS) as server:
        check(ChatCompletion, (await server.chat(**more)).json())
        streamed = await server.chat(**more, stream=True, stream_options={"include_usage": True})
        for _, data in sse(streamed.text)[:-1]:
            check(ChatChunk, json.loads(data))


async def test_other_answers() -> None:
    async with lift(FakeRunner(answering(CALL)), tokenizer=THINKS) as server:
        for more in ({}, {"logprobs": 2}):
            check(Completion, (await server.complete(**more)).json())
            for _, data in sse((await server.complete(**more, stream=True)).text)[:-1]:
                check(Completion, json.loads(data))
        check(Tokens, (await server.client.post("/tokenize", json={"prompt": "a"})).json())
        check(Detokenized, (await server.client.post("/detokenize", json={"tokens": [97]})).json())
        check(Health, (await server.client.get("/health")).json())
        check(Ready, (await server.client.get("/health/ready")).json())
        check(Error, (await server.chat(temperature=9)).json())
        await _check_messages(server)
        await _check_responses(server)


async def _check_messages(server: Lift) -> None:
    body: JSON = {"model": MODEL, "max_tokens": 999, "messages": [{"role": "user", "content": "Hi"}]}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for more in ({}, {"tools": [tool]}, {"max_tokens": 3}):
        check(AnthropicMessage, (await server.client.post("/v1/messages", json={**body, **more})).json())
    counted = await server.client.post("/v1/messages/count_tokens", json={**body, "max_tokens": None})
    check(AnthropicError, counted.json())
    del body["max_tokens"]
    check(TokenCount, (await server.client.post("/v1/messages/count_tokens", json=body)).json())


async def _check_responses(server: Lift) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for more in ({}, {"tools": [tool]}, {"max_output_tokens": 3}):
        body: JSON = {"model": MODEL, "input": "Hi", **more}
        created = await server.client.post("/v1/responses", json=body)
        check(ResponseObject, created.json())
        path = f"/v1/responses/{created.json()['id']}"
        check(ResponseObject, (await server.client.get(path)).json())
        check(InputItems, (await server.client.get(f"{path}/input_items")).json())
        check(Deleted, (await server.client.delete(path)).json())


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with lift() as server:
        page = await server.client.get("/docs")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert (await server.client.get("/")).text == page.text
        assert (await server.client.head("/")).status_code == 200
        addresses = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)["']""", page.text)
        assert len(addresses) == 4
        for address in addresses:
            assert "//" not in address
            part = await server.client.get(f"/{address}")
            assert part.status_code == 200 and len(part.content) > 1000
        assert (
            (await server.client.get("/docs/swagger-ui.css")).headers["content-type"].startswith("text/css")
        )
        for name in ("x", "redoc.standalone.js", "..%2Fcore.py"):
            assert (await server.client.get(f"/docs/{name}")).status_code == 404
