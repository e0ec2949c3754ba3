"""Engines that a test has made, for a server to start, serve and stop."""

from __future__ import annotations

import functools

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.model import Found, ModelSpec, Use
from chairlift.server.models.models import Models


def models_of(
    metrics: ServerMetrics, engine: Engine | None, embedder: EmbeddingEngine | None = None
) -> Models:
    """Of engines that are not started yet, one or both."""
    specs = [
        ModelSpec(use.value, functools.partial(Found, use, 0, functools.partial(_same, one)), use=use)
        for use, one in ((Use.GENERATION, engine), (Use.EMBEDDING, embedder))
        if one is not None
    ]
    if embedder is not None:
        metrics.watch_embedder(embedder)
    return Models(specs)


def _same(engine: Engine | EmbeddingEngine, *memory: object) -> Engine | EmbeddingEngine:
    return engine
