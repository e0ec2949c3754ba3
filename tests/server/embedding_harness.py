"""A server with a fake embedding model, beside the fake generating one or alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from chairlift.engine.embedding.engine import EmbeddingConfig, EmbeddingEngine
from chairlift.engine.embedding.types import BatchCost, Task
from chairlift.engine.engine import Engine
from chairlift.engine.memory.budget import Budget
from chairlift.server.app import create_app
from chairlift.server.metrics import ServerMetrics
from chairlift.server.settings import ServerSettings
from tests.engine.embedding.fakes import FakeEncoder, fake_embedder, score, vector
from tests.fakes import FakeRunner, fake_model
from tests.server.harness import MODEL

EMBEDDER = "org/embedder"


@dataclass(frozen=True)
class Embedding:
    embedder: EmbeddingEngine
    encoder: FakeEncoder
    app: FastAPI
    client: httpx.AsyncClient

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json={"model": EMBEDDER, **body})

    async def embed(self, given: object, **more: object) -> httpx.Response:
        return await self.post("/v1/embeddings", input=given, **more)


@asynccontextmanager
async def embedding_lift(
    *,
    task: Task = Task.EMBED,
    generation: bool = True,
    config: EmbeddingConfig | None = None,
    settings: ServerSettings | None = None,
    runner: FakeRunner | None = None,
    context_length: int = 4096,
    budget: Budget | None = None,
    batch_cost: BatchCost | None = None,
) -> AsyncIterator[Embedding]:
    encoder = FakeEncoder(vector if task is Task.EMBED else score)
    model_of_texts = fake_embedder(encoder, name=EMBEDDER, task=task, batch_cost=batch_cost)
    embedder = EmbeddingEngine(model_of_texts, config, budget=budget)
    metrics = ServerMetrics()
    model = fake_model(runner or FakeRunner(), name=MODEL, context_length=context_length)
    engine = Engine(model, observer=metrics.model(MODEL)) if generation else None
    app = create_app(engine, settings or ServerSettings(), metrics, embedder)
    if engine is not None:
        metrics.model(MODEL).watch(engine)
        await engine.start()
    await embedder.start()
    encoder.batches.clear()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Embedding(embedder, encoder, app, client)
    finally:
        encoder.gate.open()
        if engine is not None:
            await engine.stop()
        await embedder.stop()
