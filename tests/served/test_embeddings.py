"""A real embedding model beside the real generating one, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import openai
import pytest

pytest.importorskip("mlx_embeddings")

from chairlift.engine.models.resolve import resolve_model
from tests.engine.embedding.minilm import minilm
from tests.served.process import PATIENCE, Served, serving

TEXTS = [
    "A chairlift never stops.",
    "Get on while it moves.",
    "Skis point up.",
    "Tax returns are due in May. " * 4,
]
QUESTION = "Count from one to ten."


@pytest.fixture(scope="module")
def both() -> Iterator[Served]:
    source = resolve_model(None, dtype="float32", progress=False)
    names = ("--served-model-name", "smol", "--served-embedding-name", "minilm")
    with serving("--model", str(source.folder), "--embedding-model", str(minilm()), *names) as served:
        yield served


async def answer(client: openai.AsyncOpenAI) -> str | None:
    chat = await client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=10,
    )
    return chat.choices[0].message.content


@pytest.mark.slow
async def test_both_at_once_answer_as_each_alone(both: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{both.url}/v1", api_key="none", timeout=PATIENCE) as client:

        async def embed(text: str) -> np.ndarray:
            made = await client.embeddings.create(model="minilm", input=text)
            return np.array(made.data[0].embedding)

        answer_alone, alone = await answer(client), [await embed(text) for text in TEXTS]
        answering = asyncio.create_task(answer(client))
        beside = []
        while not answering.done():
            beside.append(await asyncio.gather(*map(embed, TEXTS)))
        assert await answering == answer_alone
        assert len(beside) > 1
        for vectors in beside:
            assert np.abs(np.array(vectors) - np.array(alone)).max() < 1e-5
        # The library asks for base64 where nothing is said.
        floats = await client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
        assert np.abs(np.array([item.embedding for item in floats.data]) - np.array(alone)).max() < 1e-5
        assert np.linalg.norm(alone, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-6)
        short = await client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=64)
        cut = alone[0][:64] / np.linalg.norm(alone[0][:64])
        assert np.abs(np.array(short.data[0].embedding) - cut).max() < 1e-5
        assert {model.id async for model in client.models.list()} == {"smol", "minilm"}


@pytest.mark.slow
async def test_ranking_knows_what_belongs_together(both: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{both.url}/v1", api_key="none", timeout=PATIENCE) as client:
        ranked = await client.post(
            "/rerank",
            body={"model": "minilm", "query": "income declarations", "documents": TEXTS, "top_n": 2},
            cast_to=dict,
        )
        assert [result["index"] for result in ranked["results"]][0] == 3
        assert len(ranked["results"]) == 2
