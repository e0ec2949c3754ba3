"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`; the last two under vLLM's other paths, too."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import TokenizedText, Vectors
from chairlift.engine.embedding.vectors import normalised, similarities
from chairlift.server.body import in_a_thread, receive
from chairlift.server.embedding import (
    PreparedEmbeddings,
    PreparedPairs,
    prepare_embeddings,
    prepare_rerank,
    prepare_score,
    read_embeddings,
    read_rerank,
    read_score,
)
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, request_id_of
from chairlift.server.models.model import Use
from chairlift.server.payload import PayloadResponse, dump
from chairlift.server.streaming import unless_gone
from chairlift.server.wire.embeddings import RerankRequest

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    context, raw = await receive(request, Use.EMBEDDING, in_a_thread(read_embeddings))
    prepared = await asyncio.to_thread(prepare_embeddings, raw, context)
    vectors = await _compute(request, prepared.embedder, prepared.texts)
    # A thread: the numbers of a thousand vectors take longer to write than the event loop may wait.
    body = await asyncio.to_thread(_embeddings_body, prepared, vectors)
    return Response(body, media_type="application/json", headers=_request_id(request, "embd-"))


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(request: Request) -> Response:
    context, raw = await receive(request, Use.EMBEDDING, in_a_thread(read_rerank))
    wire, documents, pairs = await asyncio.to_thread(prepare_rerank, raw, context)
    scores = await _scores(request, pairs)
    # A thread here, too: documents may be long.
    headers = _request_id(request, "rerank-")
    return await asyncio.to_thread(_ranking, wire, documents, scores, pairs, headers)


def _ranking(
    wire: RerankRequest,
    documents: Sequence[str],
    scores: npt.NDArray[np.float64],
    pairs: PreparedPairs,
    headers: dict[str, str],
) -> Response:
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[: wire.top_n or None]
    results: list[dict[str, object]] = []
    for index in best:
        result: dict[str, object] = {"index": index, "relevance_score": float(scores[index])}
        if wire.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return PayloadResponse(
        {
            "id": headers["X-Request-Id"],
            "model": pairs.embedder.info.name,
            "usage": _usage(pairs.texts),
            "results": results,
        },
        headers=headers,
    )


@router.post("/score")
@router.post("/v1/score")
async def score(request: Request) -> Response:
    context, raw = await receive(request, Use.EMBEDDING, in_a_thread(read_score))
    pairs = await asyncio.to_thread(prepare_score, raw, context)
    scores = await _scores(request, pairs)
    headers = _request_id(request, "score-")
    return PayloadResponse(
        {
            "id": headers["X-Request-Id"],
            "object": "list",
            "created": int(time.time()),
            "model": pairs.embedder.info.name,
            "data": [
                {"index": index, "object": "score", "score": float(value)}
                for index, value in enumerate(scores)
            ],
            "usage": _usage(pairs.texts),
        },
        headers=headers,
    )


async def _compute(http: Request, embedder: EmbeddingEngine, texts: Sequence[TokenizedText]) -> Vectors:
    """Raises: APIError when the client leaves, which ends the computation."""
    vectors = await unless_gone(http, (), embedder.encode(texts))
    if vectors is None:
        raise APIError(CLIENT_CLOSED_REQUEST, "The client left.")
    return vectors


async def _scores(request: Request, pairs: PreparedPairs) -> npt.NDArray[np.float64]:
    """Of each pair: a cross-encoder's own, or the cosine of the angle between the texts' vectors."""
    vectors = await _compute(request, pairs.embedder, pairs.texts)
    if not pairs.left:
        return vectors[:, 0].astype(np.float64)
    return await asyncio.to_thread(similarities, vectors[: pairs.left], vectors[pairs.left :])


def _embeddings_body(prepared: PreparedEmbeddings, vectors: Vectors) -> bytes:
    """One vector is written at a time, so that other threads come to their turn between two."""
    items = [
        dump({"object": "embedding", "index": index, "embedding": _written(vector, prepared.base64)})
        for index, vector in enumerate(normalised(vectors, prepared.dimensions))
    ]
    head = dump(
        {"object": "list", "model": prepared.embedder.info.name, "usage": _usage(prepared.texts)}
    ).removesuffix(b"}")
    return head + b',"data":[' + b",".join(items) + b"]}"


def _written(vector: Vectors, as_base64: bool) -> object:
    """Numbers, or base64 of little-endian float32, as OpenAI has it."""
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def _usage(texts: Sequence[TokenizedText]) -> dict[str, int]:
    tokens = sum(map(len, texts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _request_id(request: Request, prefix: str) -> dict[str, str]:
    return {"X-Request-Id": request_id_of(request.scope, prefix)}
