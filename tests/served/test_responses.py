"""`/v1/responses` against the real model, through OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.served.process import MODEL, PATIENCE, Served

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."


class City(BaseModel):
    city: str
    country: str


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


async def test_whole_streamed_and_gone_on_with(sdk: AsyncOpenAI) -> None:
    whole = await sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert (whole.output_text, whole.status) == (PARIS, "completed")
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (37, 8)
    async with sdk.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == PARIS and len(deltas) > 3
    more = await sdk.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=whole.id, temperature=0, max_output_tokens=40
    )
    chat = await sdk.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": PARIS},
            {"role": "user", "content": "And of Italy?"},
        ],
        temperature=0,
        max_tokens=40,
    )
    assert more.output_text == chat.choices[0].message.content
    kept = await sdk.responses.retrieve(more.id)
    assert kept.output_text == more.output_text
    await sdk.responses.delete(whole.id)


async def test_a_schema(sdk: AsyncOpenAI) -> None:
    response = await sdk.responses.parse(
        model=MODEL,
        input=f"{QUESTION} Answer in JSON.",
        text_format=City,
        max_output_tokens=200,
        temperature=0,
    )
    assert response.output_parsed is not None and response.status == "completed"
