"""The ASGI app over an engine."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Scope

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.server import errors
from chairlift.server.anthropic.errors import error_response, is_anthropic
from chairlift.server.context import Context
from chairlift.server.embedding_metrics import EmbeddingCollector
from chairlift.server.metrics import ServerMetrics
from chairlift.server.openapi import pages
from chairlift.server.routes import (
    cache,
    chat,
    completions,
    embeddings,
    health,
    messages,
    models,
    responses,
    tokenize,
)
from chairlift.server.routes import metrics as metrics_route
from chairlift.server.settings import ServerSettings


def create_app(
    engine: Engine | None,
    settings: ServerSettings,
    metrics: ServerMetrics,
    embedder: EmbeddingEngine | None = None,
) -> FastAPI:
    """Serves `engine` and `embedder`, whose lives are the caller's business: until both are ready, requests
    get 503. Either may be absent, not both.

    `metrics` should be the engine's observer.
    """
    app = FastAPI(
        title="Chairlift",
        version=version("chairlift"),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = Context(engine, settings, metrics, embedder)
    if engine is not None:
        metrics.watch(engine)
    if embedder is not None:
        metrics.registry.register(EmbeddingCollector(embedder))
    errors.install(app, _respond)
    surfaces = (chat, completions, responses, messages, embeddings, tokenize)
    for routes in (models, *surfaces, cache, health, metrics_route, pages):
        app.include_router(routes.router)
    return app


def _respond(error: errors.APIError, scope: Scope) -> Response:
    if isinstance(error, errors.ModelNotFound):
        error = _other_use(error, scope)
    return (
        error_response(error, scope) if is_anthropic(scope) else error.response(errors.request_id_of(scope))
    )


def _other_use(error: errors.ModelNotFound, scope: Scope) -> errors.APIError:
    """What is wrong is not the name, where the embedding model is asked to generate text."""
    embedder = scope["app"].state.context.embedder
    if (
        scope["method"] != "POST"
        or embedder is None
        or not embedder.ready
        or error.name != embedder.info.name
    ):
        return error
    return errors.invalid(
        f"The model {error.name!r} is served for embeddings or scores; it generates no text.",
        "model",
        "unsupported_value",
    )
