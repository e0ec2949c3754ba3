"""Whatever the body, the answer is a 200 or a refusal in the envelope: never a 500, and nothing is left."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.engine.embedding.types import Task
from chairlift.server.wire.embeddings import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from chairlift.server.wire.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest
from tests.engine.embedding.fakes import NOT_A_NUMBER, POISON
from tests.server.embedding_harness import EMBEDDER, embedding_lift
from tests.server.harness import JSON, error_of

text = st.text(st.characters(codec=None), max_size=8)
integers = st.one_of(st.integers(-3, 300), st.integers()).filter(lambda n: n not in (NOT_A_NUMBER, POISON))
number = st.one_of(integers, st.floats())
value = st.recursive(
    st.one_of(st.none(), st.booleans(), number, text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=3)),
    max_leaves=8,
)
tokens = st.lists(st.integers(-1, 253), max_size=4)
likely = st.one_of(
    text, st.lists(text, max_size=4), tokens, st.lists(tokens, max_size=3), st.integers(-1, 70), st.booleans()
)

SURFACES = {
    "/v1/embeddings": (EmbeddingRequest, EMBEDDINGS, {"input": likely}),
    "/v1/rerank": (RerankRequest, RERANK, {"query": text, "documents": st.lists(text, max_size=4)}),
    "/v1/score": (ScoreRequest, SCORE, {"text_1": likely, "text_2": likely}),
    "/tokenize": (TokenizeRequest, TOKENIZE, {"prompt": text}),
    "/detokenize": (DetokenizeRequest, DETOKENIZE, {"tokens": tokens}),
}


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, JSON]:
    path = draw(st.sampled_from(sorted(SURFACES)))
    wire, surface, needed = SURFACES[path]
    names = st.sampled_from(sorted({*wire.model_fields, *surface.neutral} - {"model"}))
    more = draw(st.dictionaries(st.one_of(names, text), st.one_of(likely, value), max_size=3))
    return path, {**draw(st.fixed_dictionaries(needed)), **more}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(asked(), min_size=8, max_size=16), st.sampled_from(Task))
def test_no_body_is_a_fault(bodies: list[tuple[str, JSON]], task: Task) -> None:
    async def run() -> None:
        async with embedding_lift(task=task) as running:
            for path, body in bodies:
                if path not in ("/tokenize", "/detokenize"):
                    body = {"model": EMBEDDER, **body}
                answer = await running.client.post(path, content=json.dumps(body).encode())
                if answer.status_code != 200:
                    assert error_of(answer, answer.status_code)["message"]
                    assert answer.status_code in (400, 404), answer.text
                else:
                    json.loads(answer.text, parse_constant=lambda name: 1 / 0)
            assert running.embedder.stats().waiting == 0

    asyncio.run(run())
