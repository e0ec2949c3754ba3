"""`/v1/embeddings` over a fake model: forms, limits, refusals."""

from __future__ import annotations

import asyncio
import base64
import math
import struct

import httpx
import openai
import pytest

from chairlift.engine.embedding.engine import EmbeddingConfig
from chairlift.engine.embedding.types import BatchCost, Task, TokenizedText
from chairlift.engine.memory.budget import Budget
from chairlift.engine.memory.guard import LEAST_CACHE, SPARE
from chairlift.server.settings import ServerSettings
from tests.engine.embedding.fakes import NOT_A_NUMBER, POISON, vector
from tests.server.embedding_harness import EMBEDDER, Embedding, embedding_lift
from tests.server.harness import JSON, MODEL, chat_body, error_of, lift


def unit(*tokens: int, dimensions: int = 4) -> list[float]:
    numbers = vector(TokenizedText(tokens))[:dimensions]
    length = math.sqrt(sum(number**2 for number in numbers))
    return [number / length for number in numbers]


def vectors(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    return [item["embedding"] for item in data]


def close(left: list[float], right: list[float]) -> bool:
    return left == pytest.approx(right, abs=1e-6)


async def test_a_string() -> None:
    async with embedding_lift() as running:
        answer = await running.embed("Hi", user="somebody", encoding_format="float")
        assert close(vectors(answer)[0], unit(1, 72, 105, 2))
        body = answer.json()
        assert (body["object"], body["model"]) == ("list", EMBEDDER)
        assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
        assert set(body) == {"object", "data", "model", "usage"}
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"].startswith("embd-")


async def test_every_form_of_input() -> None:
    async with embedding_lift() as running:
        hi, yo = unit(1, 72, 105, 2), unit(1, 89, 111, 2)
        for given, wanted, tokens in [
            (["Yo", "Hi", "Yo"], [yo, hi, yo], 12),
            ([72, 105], [unit(72, 105)], 2),
            ([[72], [1, 72, 105, 2]], [unit(72), hi], 5),
        ]:
            answer = await running.embed(given)
            found = vectors(answer)
            assert len(found) == len(wanted) and all(map(close, found, wanted))
            assert answer.json()["usage"]["prompt_tokens"] == tokens
        answer = await running.embed("Hi", add_special_tokens=False)
        assert close(vectors(answer)[0], unit(72, 105))


async def test_base64_is_little_endian_float32() -> None:
    async with embedding_lift() as running:
        numbers = vectors(await running.embed(["Hi", "there"]))
        written = [
            item["embedding"]
            for item in (await running.embed(["Hi", "there"], encoding_format="base64")).json()["data"]
        ]
        assert [list(struct.unpack("<4f", base64.b64decode(text))) for text in written] == numbers


async def test_dimensions_cut_and_scale() -> None:
    async with embedding_lift() as running:
        for dimensions in (1, 3, 4):
            (found,) = vectors(await running.embed("Hi", dimensions=dimensions))
            assert close(found, unit(1, 72, 105, 2, dimensions=dimensions))
            assert sum(number**2 for number in found) == pytest.approx(1, abs=1e-6)


async def test_too_long_texts_are_cut_only_when_asked() -> None:
    async with embedding_lift() as running:
        whole = unit(1, *b"a" * 62, 2)
        assert close(vectors(await running.embed("a" * 62))[0], whole)
        assert close(vectors(await running.embed("a" * 5000, truncate_prompt_tokens=-1))[0], whole)
        assert close(vectors(await running.embed("abcdef", truncate_prompt_tokens=4))[0], unit(1, 97, 98, 2))
        assert close(vectors(await running.embed([9] * 70, truncate_prompt_tokens=3))[0], unit(9, 9, 9))
        for given, param in (("a" * 63, "input"), (["a", "a" * 63], "input[1]"), ([5] * 65, "input")):
            error = error_of(await running.embed(given), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_memory_bounds_texts_as_the_context_does() -> None:
    cost = BatchCost(10**6)
    # A batch of 32 tokens, the least, and a text of 8 tokens more.
    budget = Budget(LEAST_CACHE + int(SPARE * cost.of(40)))
    async with embedding_lift(generation=False, budget=budget, batch_cost=cost) as server:
        for given, param in (("a" * 39, "input"), ([[9], [5] * 41], "input[1]")):
            error = error_of(await server.embed(given), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert error["message"] == f"{param} has 41 tokens; this server has memory for 40, no more."
        fits = await server.embed("a" * 38)
        cut = await server.embed("a" * 60, truncate_prompt_tokens=-1)
        assert fits.json()["usage"]["prompt_tokens"] == cut.json()["usage"]["prompt_tokens"] == 40
        assert max(len(text) for batch in server.encoder.batches for text in batch) == 40


async def test_what_is_far_too_long_is_not_tokenized() -> None:
    async with embedding_lift() as running:
        running.embedder.tokenizer = None  # type: ignore[assignment]
        error = error_of(await running.embed("a" * (64 * 256 + 1)), 400)
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, 256]}, "input[1]"),
        ({"input": [[1], [-1]]}, "input[1][0]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 2.5}, "dimensions"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "user": 5}, "user"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "tempo": 1}, "tempo"),
        ({"input": "a", "model": MODEL}, "model"),
    ],
)
async def test_refusals(body: JSON, param: str) -> None:
    async with embedding_lift() as running:
        answer = await running.post("/v1/embeddings", **body)
        assert error_of(answer, 400)["param"] == param
        assert running.encoder.batches == []


async def test_defaults_that_clients_send_pass() -> None:
    async with embedding_lift() as running:
        answer = await running.embed(
            "a", dimensions=None, user=None, priority=0, normalize=True, encoding_format=None
        )
        assert len(vectors(answer)[0]) == 4


async def test_which_model() -> None:
    async with embedding_lift() as running:
        error = error_of(await running.embed("a", model="text-embedding-3-small"), 404)
        assert error["code"] == "model_not_found"
        error = error_of(await running.embed("a", model=MODEL), 400)
        assert MODEL in str(error["message"]) and "generates text" in str(error["message"])
        models = (await running.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == [MODEL, EMBEDDER]
        card = (await running.client.get(f"/v1/models/{EMBEDDER}")).json()
        assert (card["id"], card["max_model_len"]) == (EMBEDDER, 64)
        chat = await running.client.post("/v1/chat/completions", json=chat_body(max_tokens=2))
        assert chat.status_code == 200
        for path, body in (
            ("/v1/chat/completions", chat_body()),
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            answer = await running.client.post(path, json={**body, "model": EMBEDDER})
            error = error_of(answer, 400)
            assert (error["param"], error["code"]) == ("model", "unsupported_value")
            assert "generates no text" in str(error["message"])
    async with embedding_lift(task=Task.SCORE) as running:
        error = error_of(await running.embed("a"), 400)
        assert "/v1/rerank" in str(error["message"])


async def test_without_an_embedding_model() -> None:
    async with lift() as running:
        body = {"input": "a"}
        answer = await running.client.post("/v1/embeddings", json={**body, "model": MODEL})
        assert "generates text" in str(error_of(answer, 400)["message"])
        answer = await running.client.post("/v1/embeddings", json={**body, "model": "other"})
        assert error_of(answer, 404)["code"] == "model_not_found"


async def test_without_a_generating_model() -> None:
    async with embedding_lift(generation=False) as running:
        assert len(vectors(await running.embed("a"))) == 1
        models = (await running.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == [EMBEDDER]
        for path, body in (
            ("/v1/chat/completions", chat_body()),
            ("/v1/completions", {"model": MODEL, "prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            error = error_of(await running.client.post(path, json=body), 404)
            assert "serves embeddings" in str(error["message"])
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert (await running.client.get("/health/ready")).status_code == 200
        assert (await running.client.get("/metrics")).status_code == 200


async def test_without_a_generating_model_no_endpoint_is_at_fault() -> None:
    messages = [{"role": "user", "content": "a"}]
    bodies: dict[str, JSON] = {
        "/v1/responses": {"input": "a"},
        "/v1/responses/input_tokens": {"input": "a"},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": messages},
        "/detokenize": {"tokens": [1]},
    }
    async with embedding_lift(generation=False) as running:
        described = (await running.client.get("/openapi.json")).json()["paths"]
        assert set(bodies) <= set(described)
        for path, operations in described.items():
            for method in operations:
                body = {"model": "x", **bodies.get(path, {})} if method == "post" else None
                where = path.replace("{response_id}", "resp_1").replace("{model_id}", "x")
                answer = await running.client.request(method.upper(), where, json=body)
                assert answer.status_code < 500, (where, answer.text)
                if path in bodies:
                    assert answer.status_code == 404, (where, answer.text)


async def test_faults_are_500_and_go_no_further() -> None:
    async with embedding_lift() as running:
        for token in (POISON, NOT_A_NUMBER):
            bad, good = await asyncio.gather(running.embed([token]), running.embed("a"))
            assert error_of(bad, 500)["code"] == "engine_error"
            assert close(vectors(good)[0], unit(1, 97, 2))


async def gated(running: Embedding) -> None:
    assert await asyncio.to_thread(running.encoder.gate.wait)


async def until_waiting(running: Embedding, requests: int) -> None:
    async with asyncio.timeout(10):
        while running.embedder.stats().waiting != requests:
            await asyncio.sleep(0.001)


async def test_a_full_queue_is_429() -> None:
    async with embedding_lift(config=EmbeddingConfig(max_waiting=1)) as running:
        running.encoder.gate.close()
        first = asyncio.create_task(running.embed("a"))
        await gated(running)
        second = asyncio.create_task(running.embed("b"))
        await until_waiting(running, 1)
        refused = await running.embed("c")
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        running.encoder.gate.open()
        assert {(await task).status_code for task in (first, second)} == {200}


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with embedding_lift() as running:
        running.encoder.gate.close()
        first = asyncio.create_task(running.embed("a"))
        await gated(running)
        sent: list[str] = []

        async def receive() -> dict[str, object]:
            if not sent:
                sent.append("body")
                return {"type": "http.request", "body": b'{"model": "org/embedder", "input": "bb"}'}
            await until_waiting(running, 1)
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/embeddings",
            "raw_path": b"/v1/embeddings",
            "query_string": b"",
            "headers": [],
            "app": running.app,
        }

        async def send(message: object) -> None: ...

        await running.app(scope, receive, send)  # type: ignore[arg-type]
        await until_waiting(running, 0)
        running.encoder.gate.open()
        await first
        assert [len(batch) for batch in running.encoder.batches] == [1]


async def test_a_batch_that_does_not_come_back_shows_in_health() -> None:
    for generation in (True, False):
        async with embedding_lift(
            generation=generation, settings=ServerSettings(wedge_after_s=0.0)
        ) as running:
            assert (await running.client.get("/health")).json()["stalled_s"] == 0
            running.encoder.gate.close()
            asked = asyncio.create_task(running.embed("a"))
            await gated(running)
            health = await running.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "stalled")
            running.encoder.gate.open()
            assert (await asked).status_code == 200
            assert (await running.client.get("/health")).status_code == 200


async def test_the_body_limit_holds() -> None:
    async with embedding_lift(settings=ServerSettings(max_body_bytes=100)) as running:
        assert error_of(await running.embed("a" * 200), 413)["code"] == "request_too_large"


async def test_metrics() -> None:
    async with embedding_lift() as running:
        await running.embed(["Hi", "there"])
        text = (await running.client.get("/metrics")).text
        for name, value in (("requests_total", 1), ("texts_total", 2), ("tokens_total", 11)):
            assert f'chairlift_embedding_{name}{{model_name="{EMBEDDER}"}} {value}.0' in text.splitlines()


async def test_openais_library() -> None:
    async with embedding_lift() as running:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=running.client)
        # It asks for base64 and decodes it, unless told otherwise.
        by_default = await client.embeddings.create(model=EMBEDDER, input=["Hi", "there"])
        asked = await client.embeddings.create(
            model=EMBEDDER, input=["Hi", "there"], encoding_format="float", dimensions=4, user="me"
        )
        assert [item.embedding for item in by_default.data] == [item.embedding for item in asked.data]
        assert close(by_default.data[0].embedding, unit(1, 72, 105, 2))
        assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 11
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="generates text"):
            await client.embeddings.create(model=MODEL, input="a")
