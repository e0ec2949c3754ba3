"""Answers under a schema, and answers that go on with what the client began, with Anthropic's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from anthropic import AsyncAnthropic
from anthropic.types import MessageParam
from pydantic import BaseModel

from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRow, FakeRunner, answering, letters
from tests.server.anthropic.asking import ask, refusal
from tests.server.harness import MODEL, Lift, lift, on_socket

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]


class Person(BaseModel):
    """The SDK asks for no bounds of texts and lists, so there are none here."""

    name: Literal["Ann", "Bob"]
    old: bool
    mother: Literal["Eve"] | None


@asynccontextmanager
async def serving(
    runner: FakeRunner, tokenizer: FakeTokenizer | None = None
) -> AsyncIterator[tuple[Lift, AsyncAnthropic]]:
    async with (
        lift(runner, tokenizer=tokenizer) as server,
        on_socket(server.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield server, client


def noise(row: FakeRow) -> int:
    token = letters(row)
    return b'{}[]",: 0123456789-.truefalsn'[token % 29] if token % 2 else token


async def test_parsed_answers_of_a_model_that_says_anything() -> None:
    async with serving(FakeRunner(noise)) as (_, client):
        message = await client.messages.parse(model=MODEL, max_tokens=900, messages=HI, output_format=Person)
        assert isinstance(message.parsed_output, Person)
        async with client.messages.stream(
            model=MODEL, max_tokens=900, messages=HI, output_format=Person
        ) as stream:
            final = await stream.get_final_message()
        assert isinstance(final.parsed_output, Person)
        again = await client.messages.parse(
            model=MODEL,
            max_tokens=900,
            messages=[*HI, {"role": "assistant", "content": final.content}, *HI],
            output_format=Person,
        )
        assert isinstance(again.parsed_output, Person)


async def test_a_schema_cut_off_by_max_tokens_says_so() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 50}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    async with lift(FakeRunner(noise)) as server:
        reply = (await ask(server, output_config={"format": form}, max_tokens=20)).json()
    assert reply["stop_reason"] == "max_tokens" and reply["content"][0]["text"].startswith("{")


async def test_schemas_that_cannot_be_followed_are_refused_at_their_place() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": endless}
    async with lift() as server:
        cases: list[tuple[dict[str, object], str]] = [
            ({"output_config": {"format": form}}, "output_config.format.schema "),
            ({"output_format": form}, "output_format.schema "),
        ]
        for more, place in cases:
            error = refusal(await ask(server, **more), 400)
            assert error["type"] == "invalid_request_error"
            assert str(error["message"]).startswith(place)


async def test_the_answer_goes_on_with_what_the_client_began() -> None:
    tokenizer = FakeTokenizer()
    async with serving(FakeRunner(answering("B)")), tokenizer) as (server, client):
        began: list[MessageParam] = [*HI, {"role": "assistant", "content": "The best answer is ("}]
        message = await client.messages.create(model=MODEL, max_tokens=9, messages=began)
        assert message.content[0].type == "text" and message.content[0].text == "B)"
        prompt = [token for plan in server.runner.plans for span in plan.prefill for token in span.tokens]
        assert bytes(prompt[-20:]) == b"The best answer is ("
