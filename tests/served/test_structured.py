"""The embedded model under schemas: every answer that ends validates, in a batch as alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from chairlift.engine.models.resolve import resolve_model
from chairlift.engine.models.tokenizer import load_tokenizer
from tests.served.process import MODEL, Served, serving

pytestmark = pytest.mark.slow
Asked = dict[str, Any]
SHORT = {"type": "string", "minLength": 1, "maxLength": 12}


def closed(**properties: object) -> Asked:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Asked] = {
    "Describe a person as JSON.": closed(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "Is water wet? Answer as JSON.": closed(answer={"type": "boolean"}, sure={"enum": ["yes", "no", None]}),
    "Give me small numbers.": {
        "type": "array",
        "items": {"type": "integer", "minimum": -9, "maximum": 99},
        "minItems": 1,
        "maxItems": 4,
    },
    "Where is Paris? Answer as JSON.": {
        "type": "object",
        "properties": {"city": SHORT, "at": {"$ref": "#/$defs/place"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"place": closed(x={"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9})},
    },
    "When was the war? Answer as JSON.": closed(
        on={"type": "string", "pattern": "^1[0-9]{3}-[01][0-9]$"}, kind={"anyOf": [{"const": "war"}, SHORT]}
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One with many seats: a step costs little more for them."""
    with serving("--max-num-seqs", "50", "--max-waiting", "100") as server:
        yield server


@pytest.fixture
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        yield client


def asked(index: int) -> Asked:
    question, schema = list(SCHEMAS.items())[index % len(SCHEMAS)]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": index % 3 / 2,
        "seed": index,
        "max_tokens": 200,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    }


async def choice(client: httpx.AsyncClient, asked: Asked) -> Asked:
    response = await client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    found: Asked = response.json()["choices"][0]
    return found


async def test_a_hundred_answers_validate(client: httpx.AsyncClient) -> None:
    """And company changes nothing: some are asked again alone."""
    choices = await asyncio.gather(*(choice(client, asked(index)) for index in range(100)))
    for index, found in enumerate(choices):
        assert found["finish_reason"] == "stop", found
        schema = asked(index)["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(found["message"]["content"]), schema)
    assert len({found["message"]["content"] for found in choices}) > 40
    for index in (2, 8):
        assert await choice(client, asked(index)) == choices[index]


async def test_patterns_choices_and_grammars(client: httpx.AsyncClient) -> None:
    base = {key: value for key, value in asked(1).items() if key != "response_format"}
    forms: list[tuple[Asked, str]] = [
        ({"regex": r"[A-Z][a-z]{2,6}, [0-9]{4}"}, r"[A-Z][a-z]{2,6}, [0-9]{4}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        (
            {"grammar": 'start: "Paris" (" and " city)?\ncity: "Rome" | "Z\u00fcrich"'},
            "Paris( and (Rome|Z\u00fcrich))?",
        ),
    ]
    found = await asyncio.gather(*(choice(client, {**base, "structured_outputs": form}) for form, _ in forms))
    for each, (_, pattern) in zip(found, forms, strict=True):
        assert re.fullmatch(pattern, each["message"]["content"]), each
        assert each["finish_reason"] == "stop"


class City(BaseModel):
    name: str = Field(max_length=12)
    large: bool


async def test_the_sdk_parses_the_models_answer(server: Served) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client:
        completion = await client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe Paris as JSON."}],
            response_format=City,
            temperature=0,
            max_tokens=100,
        )
    assert isinstance(completion.choices[0].message.parsed, City)


def test_every_token_of_the_vocabulary_is_known_by_its_bytes() -> None:
    """llguidance's bytes of a token are the text that the tokenizer gives; special tokens are marked."""
    tokenizer = load_tokenizer(resolve_model(None).folder)
    vocabulary = tokenizer.grammar_vocabulary()
    assert vocabulary.vocab_size == tokenizer.vocab_size
    assert set(vocabulary.eos_tokens) == tokenizer.eos_token_ids
    special = {token for token in range(tokenizer.vocab_size) if vocabulary.is_special_token(token)}
    assert special == set(tokenizer.special_tokens.values())
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if "\ufffd" not in text:
            assert vocabulary.decode_str([token]) == text
