"""Answers under a schema, a pattern, choices or a grammar over HTTP, and what is refused of them."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest
from openai import AsyncOpenAI, LengthFinishReasonError
from pydantic import BaseModel

from chairlift.engine.engine import EngineConfig
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRow, FakeRunner, answering, letters
from tests.server.harness import JSON, MODEL, Lift, error_of, lift, on_socket, stream_of

PERSON: JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS: JSON = {
    "type": "object",
    "properties": {"a": {"$ref": "#"}},
    "required": ["a"],
    "additionalProperties": False,
}
EXAMPLE = '{"name": "Ann", "age": 31, "tags": ["red"]}'


def named(schema: JSON | None, **more: object) -> JSON:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **more}}


def content(answer: JSON) -> str:
    return str(answer["choices"][0]["message"]["content"])  # type: ignore[index]


def text(answer: JSON) -> str:
    return str(answer["choices"][0]["text"])  # type: ignore[index]


def noise(row: FakeRow) -> int:
    """Printable bytes, and sometimes the end."""
    token = letters(row)
    return EOS if token == ord("q") else b'{}[]",: 0123456789-.truefalsn'[token % 29] if token % 2 else token


@pytest.mark.parametrize("strict", [True, False, None])
async def test_json_schema(strict: bool | None) -> None:
    async with lift(FakeRunner(noise)) as server:
        for seed in range(5):
            response = await server.chat(
                response_format=named(PERSON, strict=strict), temperature=1, seed=seed
            )
            answer = response.json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            jsonschema.validate(json.loads(content(answer)), PERSON)


async def test_what_the_model_would_say_anyway_stays_as_it_is() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server:
        answer = (await server.chat(response_format=named(PERSON, strict=True))).json()
        assert content(answer) == EXAMPLE
        assert answer["usage"]["completion_tokens"] == len(EXAMPLE) + 1
        free = (await server.chat(response_format={"type": "text"})).json()
        assert content(free) == EXAMPLE
        assert text((await server.complete(response_format=named(PERSON), max_tokens=99)).json()) == EXAMPLE


async def test_json_object_and_schemas_left_out() -> None:
    async with lift(FakeRunner(noise)) as server:
        for form in ({"type": "json_object"}, named(None)):
            answer = (await server.chat(response_format=form)).json()
            value = json.loads(content(answer))
            assert isinstance(value, dict) or form["type"] == "json_schema"
    async with lift(FakeRunner(answering("Sure! {}"))) as server:
        answer = (await server.chat(response_format={"type": "json_object"})).json()
        assert isinstance(json.loads(content(answer)), dict)


FORMS: list[tuple[JSON, str]] = [
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"choice": ["yes", "no", "<|im_end|>"]}, r"yes|no|<\|im_end\|>"),
    ({"grammar": 'start: "a" digits\ndigits: /[0-9]{2}/'}, "a[0-9]{2}"),
    ({"grammar": 'root ::= ("x" | "y") [0-9]'}, "[xy][0-9]"),
    ({"json": {"enum": [12, "x"]}}, '12|"x"'),
    ({"json": '{"const": null}'}, "null"),
    (
        {
            "json": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "disable_any_whitespace": True,
        },
        r"\[\S*\]",
    ),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
async def test_structured_outputs_and_their_older_names(form: JSON, pattern: str) -> None:
    async with lift(FakeRunner(noise)) as server:
        outputs = {"structured_outputs": form}
        older = {f"guided_{name}": value for name, value in form.items() if name != "disable_any_whitespace"}
        for more in (outputs, older) if len(older) == len(form) else (outputs,):
            chat = (await server.chat(**more)).json()
            assert re.fullmatch(pattern, content(chat)), content(chat)
            completion = (await server.complete(**more, max_tokens=99)).json()
            assert re.fullmatch(pattern, text(completion)), text(completion)


async def test_a_choice_that_spells_a_special_token_is_text() -> None:
    async with lift(FakeRunner(answering("<|im_end|>"))) as server:
        answer = (await server.chat(structured_outputs={"choice": ["<|im_end|>", "x"]})).json()
        assert content(answer) == "<|im_end|>"


async def test_max_tokens_within_json_is_length() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server:
        answer = (await server.chat(response_format=named(PERSON), max_tokens=9)).json()
        assert content(answer) == EXAMPLE[:9]
        assert answer["choices"][0]["finish_reason"] == "length"
        whole = (await server.chat(response_format=named(PERSON), max_tokens=len(EXAMPLE) + 1)).json()
        assert whole["choices"][0]["finish_reason"] == "stop"


async def test_streams_equal_whole_answers() -> None:
    async with lift(FakeRunner(noise)) as server:
        asked: JSON = {"response_format": named(PERSON), "temperature": 1, "seed": 4}
        whole = content((await server.chat(**asked)).json())
        chunks = stream_of(await server.chat(**asked, stream=True))
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]  # type: ignore[index]
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 3
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]


async def test_choices_and_company_change_nothing() -> None:
    """Several choices, and other requests beside them: each the answer that it has alone."""
    async with lift(FakeRunner(noise), config=EngineConfig(max_num_seqs=6)) as server:
        one: JSON = {"response_format": named(PERSON), "temperature": 1, "seed": 7, "n": 3}
        two: JSON = {"structured_outputs": {"regex": "[a-z]{5,9}"}, "temperature": 1, "seed": 8}
        free: JSON = {"temperature": 1, "seed": 9, "max_tokens": 12}
        alone = [(await server.chat(**asked)).json()["choices"] for asked in (one, two, free)]
        together = await asyncio.gather(*(server.chat(**asked) for asked in (one, two, free)))
        assert [response.json()["choices"] for response in together] == alone
        for choice in alone[0]:
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


async def test_after_preemption_it_goes_on() -> None:
    async with lift(FakeRunner(noise)) as server:
        asked: JSON = {"response_format": named(PERSON), "temperature": 1, "seed": 3}
        alone = content((await server.chat(**asked)).json())
        server.runner.close_gate()
        asking = asyncio.create_task(server.chat(**asked))
        await server.runner.at_gate()
        await server.runner.let_through(6)
        (row,) = server.engine._scheduler.rows
        assert row.drawn
        server.engine._scheduler.preempt(row)
        server.runner.open_gate()
        assert content((await asking).json()) == alone


SCHEMA = "response_format.json_schema.schema"
OUTPUTS = "structured_outputs"
REFUSED: list[tuple[JSON, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
    ({"response_format": named([1])}, SCHEMA),  # type: ignore[arg-type]
    ({"response_format": named(ENDLESS)}, SCHEMA),
    ({"response_format": named({"$ref": "#"})}, SCHEMA),
    ({"response_format": named({"enum": []})}, SCHEMA),
    ({"response_format": named({"type": "string", "minLength": 2, "maxLength": 1})}, SCHEMA),
    ({"response_format": named({"type": "thing"})}, SCHEMA),
    ({"response_format": named({"not": {}}, strict=True)}, SCHEMA),
    ({"response_format": named({"enum": ["x" * 300_000]})}, SCHEMA),
    ({"response_format": named({"type": "integer", "multipleOf": 1000003})}, SCHEMA),
    ({"response_format": named({"minimum": 10**400})}, SCHEMA),
    ({OUTPUTS: {}}, OUTPUTS),
    ({OUTPUTS: []}, OUTPUTS),
    ({OUTPUTS: {"json_object": False}}, OUTPUTS),
    ({OUTPUTS: {"json": "{"}}, f"{OUTPUTS}.json"),
    ({OUTPUTS: {"json": "[" * 5000}}, f"{OUTPUTS}.json"),
    ({OUTPUTS: {"json": "3"}}, f"{OUTPUTS}.json"),
    ({OUTPUTS: {"json": 3}}, f"{OUTPUTS}.json"),
    ({OUTPUTS: {"regex": "(a"}}, f"{OUTPUTS}.regex"),
    ({OUTPUTS: {"regex": 5}}, f"{OUTPUTS}.regex"),
    ({OUTPUTS: {"regex": "(a{1000}){1000}"}}, f"{OUTPUTS}.regex"),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice"),
    ({OUTPUTS: {"choice": [1]}}, f"{OUTPUTS}.choice[0]"),
    ({OUTPUTS: {"choice": ["x" * 70_000]}}, f"{OUTPUTS}.choice"),
    ({OUTPUTS: {"choice": ["x"] * 1001}}, f"{OUTPUTS}.choice"),
    ({OUTPUTS: {"grammar": "nonsense"}}, f"{OUTPUTS}.grammar"),
    ({OUTPUTS: {"grammar": 'start: "a" start'}}, f"{OUTPUTS}.grammar"),
    ({OUTPUTS: {"grammar": 'root ::= "a" root'}}, f"{OUTPUTS}.grammar"),
    ({OUTPUTS: {"regex": "a", "choice": ["b"]}}, f"{OUTPUTS}.choice"),
    ({OUTPUTS: {"regex": "a", "whitespace_pattern": " "}}, f"{OUTPUTS}.whitespace_pattern"),
    ({OUTPUTS: {"structural_tag": "{}"}}, f"{OUTPUTS}.structural_tag"),
    (
        {OUTPUTS: {"json": {}, "disable_additional_properties": True}},
        f"{OUTPUTS}.disable_additional_properties",
    ),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_json": ENDLESS}, "guided_json"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_what_is_refused_before_anything_is_generated(name: str) -> None:
    async with lift() as server:
        ask = server.chat if name == "chat" else server.complete
        for more, param in REFUSED:
            error = error_of(await ask(**more), 400)
            assert error["param"] == param, (more, error)
            assert "\n" not in str(error["message"]), error
        assert server.engine.stats().prompt_tokens == 0
        assert (await ask(max_tokens=1)).status_code == 200


async def thinking_lift(answer: str, opens: str = "") -> tuple[JSON, str]:
    template = "{{ '<think>' }}{{ '</think>' }}"
    tokenizer = FakeTokenizer(template=template, opens=opens)
    async with lift(FakeRunner(answering(tokenizer.marked(answer))), tokenizer=tokenizer) as server:
        reply = (await server.chat(response_format=named(PERSON))).json()
        message = reply["choices"][0]["message"]
        assert reply["choices"][0]["finish_reason"] == "stop"
        return message, str(message["content"])


@pytest.mark.parametrize(
    ("answer", "opens", "thought"),
    [
        (f"<think>\nHm {{, well.\n</think>\n\n{EXAMPLE}", "", "Hm {, well."),
        (f"Hm {{, well.\n</think>\n\n{EXAMPLE}", "<think>\n", "Hm {, well."),
        (f"</think>{EXAMPLE}", "<think>", None),
        (EXAMPLE, "", None),
        (EXAMPLE, "<think>\n\n</think>\n\n", None),
    ],
)
async def test_thinking_is_free_and_the_answer_is_not(answer: str, opens: str, thought: str | None) -> None:
    message, said = await thinking_lift(answer, opens)
    assert said == EXAMPLE
    assert (str(message.get("reasoning_content") or "").strip() or None) == thought


async def test_an_answer_that_leaves_the_schema_after_thinking_is_put_right() -> None:
    _, said = await thinking_lift("Well.</think>\n\nHere you are: {", "<think>\n")
    jsonschema.validate(json.loads(said), PERSON)


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


async def parsing(server: Lift, **more: object) -> object:
    async with on_socket(server.app) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with client:
            completion = await client.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": "Who?"}],
                response_format=Person,
                **more,  # type: ignore[arg-type]
            )
    return completion.choices[0].message.parsed


async def test_the_sdk_parses_into_pydantic_models() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server:
        assert await parsing(server) == Person(name="Ann", age=31, tags=["red"])
    async with lift(FakeRunner(answering("Sure!"))) as server:
        assert isinstance(await parsing(server), Person)
        with pytest.raises(LengthFinishReasonError):
            await parsing(server, max_tokens=5)


async def test_the_sdk_streams_into_pydantic_models() -> None:
    async with lift(FakeRunner(answering(EXAMPLE))) as server, on_socket(server.app) as url:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Who?"}]
        async with (
            client,
            client.chat.completions.stream(
                model=MODEL,
                messages=messages,  # type: ignore[arg-type]
                response_format=Person,
            ) as stream,
        ):
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ann", age=31, tags=["red"])
