"""`/v1/rerank` and `/v1/score` over fake models of both kinds."""

from __future__ import annotations

import math

import pytest

from chairlift.engine.embedding.types import Task, TokenizedText
from tests.engine.embedding.fakes import vector
from tests.server.embedding_harness import EMBEDDER, embedding_lift
from tests.server.harness import JSON, MODEL, error_of

DOCUMENTS = ["abc", "a", "abcdef"]


def cosine(left: str, right: str) -> float:
    first, second = (vector(TokenizedText((1, *text.encode(), 2))) for text in (left, right))
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    return dot / math.hypot(*first) / math.hypot(*second)


async def test_rerank_with_a_cross_encoder() -> None:
    async with embedding_lift(task=Task.SCORE) as running:
        answer = await running.post("/v1/rerank", query="xy", documents=DOCUMENTS)
        body = answer.json()
        # [1 x y 1 a b c 2]: the second text has 5 tokens, the first 3.
        assert body["results"] == [
            {"index": 2, "relevance_score": 5.0, "document": {"text": "abcdef"}},
            {"index": 0, "relevance_score": 2.0, "document": {"text": "abc"}},
            {"index": 1, "relevance_score": 0.0, "document": {"text": "a"}},
        ]
        assert body["model"] == EMBEDDER and body["id"].startswith("rerank-")
        assert body["usage"] == {"prompt_tokens": 8 + 6 + 11, "total_tokens": 25}
        shorter = await running.post(
            "/v1/rerank", query="xy", documents=DOCUMENTS, top_n=1, return_documents=False
        )
        assert shorter.json()["results"] == [{"index": 2, "relevance_score": 5.0}]
        for path in ("/rerank", "/v2/rerank"):
            again = await running.post(path, query="xy", documents=[{"text": text} for text in DOCUMENTS])
            assert again.json()["results"] == body["results"]
        every = await running.post("/v1/rerank", query="xy", documents=DOCUMENTS, top_n=0)
        assert every.json()["results"] == body["results"]


async def test_rerank_with_an_embedding_model_goes_by_the_angle() -> None:
    async with embedding_lift() as running:
        results = (await running.post("/v1/rerank", query="abd", documents=DOCUMENTS)).json()["results"]
        wanted = {index: cosine("abd", text) for index, text in enumerate(DOCUMENTS)}
        assert [result["index"] for result in results] == sorted(wanted, key=lambda index: -wanted[index])
        for result in results:
            assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-6)


async def test_score() -> None:
    async with embedding_lift(task=Task.SCORE) as running:
        for left, right, scores in [
            ("xy", "abc", [2]),
            ("xy", DOCUMENTS, [2, 0, 5]),
            (["xy"], DOCUMENTS, [2, 0, 5]),
            (["xy", "abcd", "x"], DOCUMENTS, [2, -2, 6]),
        ]:
            answer = await running.post("/v1/score", text_1=left, text_2=right)
            body = answer.json()
            assert body["data"] == [
                {"index": index, "object": "score", "score": float(score)}
                for index, score in enumerate(scores)
            ]
        assert (body["object"], body["model"]) == ("list", EMBEDDER)
        assert body["id"].startswith("score-")
        assert (await running.post("/score", text_1="xy", text_2="abc")).json()["data"][0]["score"] == 2
    async with embedding_lift() as running:
        body = (await running.post("/v1/score", text_1=["abd", "b"], text_2=["abc", "cc"])).json()
        found = [item["score"] for item in body["data"]]
        assert found == pytest.approx([cosine("abd", "abc"), cosine("b", "cc")], abs=1e-6)


async def test_long_documents_are_cut_when_asked() -> None:
    async with embedding_lift(task=Task.SCORE) as running:
        asked: JSON = {"query": "xy", "documents": ["ok", "a" * 100]}
        error = error_of(await running.post("/v1/rerank", **asked), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "documents[1]")
        answer = await running.post("/v1/rerank", **asked, truncate_prompt_tokens=10)
        # 3 tokens of the query, 1 and 2 around what is left of the document.
        assert answer.json()["results"][0] == {
            "index": 1,
            "relevance_score": 4.0,
            "document": {"text": "a" * 100},
        }


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("rerank", {"query": "a"}, 400, "documents"),
        ("rerank", {"documents": ["a"]}, 400, "query"),
        ("rerank", {"query": "", "documents": ["a"]}, 400, "query"),
        ("rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents[1]"),
        ("rerank", {"query": "a", "documents": ["b", {"image": "c"}]}, 400, "documents[1].text"),
        ("rerank", {"query": "a", "documents": [1]}, 400, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["b"] * 2049}, 400, "documents"),
        ("rerank", {"query": ["a"], "documents": ["b"]}, 400, "query"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n"),
        ("rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, 400, "rank_fields"),
        ("rerank", {"query": "a", "documents": ["b"], "model": "other"}, 404, "model"),
        ("rerank", {"query": "a", "documents": ["b"], "model": MODEL}, 400, "model"),
        ("score", {"text_1": "a"}, 400, "text_2"),
        ("score", {"text_1": [], "text_2": ["a"]}, 400, "text_1"),
        ("score", {"text_1": "a", "text_2": []}, 400, "text_2"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("score", {"text_1": ["a", "b"], "text_2": "a"}, 400, "text_1"),
        ("score", {"text_1": "a", "text_2": ["b", ""]}, 400, "text_2[1]"),
        ("score", {"text_1": "a", "text_2": "b", "model": MODEL}, 400, "model"),
        ("score", {"text_1": "a", "text_2": "b", "tempo": 1}, 400, "tempo"),
    ],
)
async def test_refusals(path: str, body: JSON, status: int, param: str) -> None:
    for task in Task:
        async with embedding_lift(task=task) as running:
            answer = await running.post(f"/v1/{path}", **body)
            assert error_of(answer, status)["param"] == param
