"""`text.format`: answers under a schema, the SDK's `parse`, and what is refused by which name."""

from __future__ import annotations

import json

import jsonschema
import openai
import pydantic
import pytest

from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, MODEL, error_of, lift
from tests.server.responses.asking import Recorder, respond, response_of, stream_of
from tests.server.test_sdk import client_of
from tests.server.test_structured import ENDLESS, EXAMPLE, PERSON, Person, noise


def person(schema: object = PERSON, **more: object) -> JSON:
    return {"format": {"type": "json_schema", "name": "person", "schema": schema, **more}}


def text_of(response: JSON) -> str:
    return str(response["output"][0]["content"][0]["text"])  # type: ignore[index]


async def test_an_answer_follows_its_schema() -> None:
    async with lift(FakeRunner(noise)) as server:
        for seed in range(2):
            more: JSON = {"text": person(strict=True), "temperature": 1, "seed": seed}
            whole = await response_of(server, **more)
            jsonschema.validate(json.loads(text_of(whole)), PERSON)
            assert whole["text"] == {**person(strict=True), "verbosity": "medium"}
            streamed = (await stream_of(server, **more))[-1]["response"]
            assert isinstance(streamed, dict) and text_of(streamed) == text_of(whole)
        free = await response_of(server, text={"format": {"type": "json_object"}})
        assert isinstance(json.loads(text_of(free)), dict)
        chosen = await response_of(server, structured_outputs={"choice": ["yes", "no"]})
        assert text_of(chosen) in ("yes", "no")


async def test_a_limit_within_json_is_incomplete() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server:
        response = await response_of(server, text=person(), max_output_tokens=9)
    assert (text_of(response), response["status"]) == (EXAMPLE[:9], "incomplete")


async def test_what_is_refused() -> None:
    async with lift() as server:
        for text, param in (
            (person(ENDLESS), "text.format.schema"),
            (person({"type": "thing"}), "text.format.schema"),
            (person([1]), "text.format.schema"),
            (person({"enum": ["x" * 300_000]}), "text.format.schema"),
            ({"format": {"type": "json_schema", "name": "a"}}, "text.format.schema"),
            ({"format": {"type": "json_schema", "schema": {}}}, "text.format.name"),
        ):
            error = error_of(await respond(server, text=text), 400)
            assert error["param"] == param, error
            assert "response_format" not in str(error["message"]), error
        both = await respond(server, text=person(), structured_outputs={"regex": "a"})
        assert "response_format" not in both.text
        error_of(both, 400)
        assert error_of(await respond(server, structured_outputs={"regex": "(a"}), 400)["param"] == (
            "structured_outputs.regex"
        )


async def test_the_sdk_parses_into_pydantic_models() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server, client_of(server) as client:
        parsed = await client.responses.parse(model=MODEL, input="Who?", text_format=Person)
        assert parsed.output_parsed == Person(name="Ann", age=31, tags=["red"])
        async with client.responses.stream(model=MODEL, input="Who?", text_format=Person) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == parsed.output_parsed
        with pytest.raises(pydantic.ValidationError):
            await client.responses.parse(model=MODEL, input="Who?", text_format=Person, max_output_tokens=5)


async def test_words_of_the_client_are_no_places() -> None:
    tools = [{"type": "function", "name": name} for name in ("messages.99", "messages.99")]
    async with lift() as server:
        error = error_of(await respond(server, tools=tools), 400)
        assert error["param"] == "tools[1].name" and "messages.99" in str(error["message"])
        choice = {"type": "function", "name": "messages[99].content"}
        error = error_of(await respond(server, tools=tools[:1], tool_choice=choice), 400)
        assert error["param"] == "tool_choice.name"


class Look(pydantic.BaseModel):
    """Look at a place."""

    at: str


CALLING = Recorder(template="<tool_call> tool_call.name")


async def test_calls_that_must_be_made() -> None:
    wait: JSON = {"type": "function", "name": "wait"}
    look: JSON = {"type": "function", "name": "look", "parameters": Look.model_json_schema(), "strict": True}
    async with lift(FakeRunner(noise), tokenizer=CALLING) as server:
        for choice, names in (
            ("required", {"look", "wait"}),
            ({"type": "function", "name": "look"}, {"look"}),
            (
                {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "wait"}],
                },
                {"wait"},
            ),
        ):
            response = await response_of(server, tools=[look, wait], tool_choice=choice)
            call = response["output"][0]  # type: ignore[index]
            assert call["type"] == "function_call" and call["name"] in names
            assert response["tool_choice"] == choice
            if call["name"] == "look":
                Look.model_validate_json(call["arguments"])


async def test_the_sdk_parses_the_arguments_of_calls() -> None:
    async with lift(FakeRunner(noise), tokenizer=CALLING) as server, client_of(server) as client:
        tools = [openai.pydantic_function_tool(Look)]
        parsed = await client.responses.parse(model=MODEL, input="Hi", tools=tools, tool_choice="required")
        call = parsed.output[0]
        assert call.type == "function_call" and isinstance(call.parsed_arguments, Look)
        async with client.responses.stream(
            model=MODEL, input="Hi", tools=tools, tool_choice="required"
        ) as stream:
            call = (await stream.get_final_response()).output[0]
        assert call.type == "function_call" and isinstance(call.parsed_arguments, Look)
