"""The ASGI app over the models."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.responses import Response
from starlette.types import Scope

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.server import errors
from chairlift.server.anthropic.errors import refusal_of
from chairlift.server.context import Context
from chairlift.server.entrance import Entrance
from chairlift.server.metrics import ServerMetrics
from chairlift.server.metrics.models import ModelsCollector
from chairlift.server.models.leases import Leases
from chairlift.server.models.models import Models
from chairlift.server.observe.install import observe
from chairlift.server.observe.record import note_error
from chairlift.server.observe.traces import Tracing
from chairlift.server.openapi import pages
from chairlift.server.query import check_query
from chairlift.server.routes import (
    cache,
    chat,
    completions,
    embeddings,
    health,
    messages,
    responses,
    tokenize,
)
from chairlift.server.routes import metrics as metrics_route
from chairlift.server.routes import models as models_route
from chairlift.server.security.install import install_cors, install_guards
from chairlift.server.settings import ServerSettings


def create_app(
    engine: Engine | None,
    settings: ServerSettings,
    metrics: ServerMetrics,
    embedder: EmbeddingEngine | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Serves `engine` and `embedder`, whose lives are the caller's business: until they are ready, requests
    get 503. Either may be absent, not both.

    `metrics`: its `model` for the served name should be the engine's observer and watch it.

    Raises: KeyFault: the keys cannot be used.
    """
    if embedder is not None:
        metrics.watch_embedder(embedder)
    return app_of(Models.of(engine, embedder), settings, metrics, tracing)


def app_of(
    models: Models, settings: ServerSettings, metrics: ServerMetrics, tracing: Tracing | None = None
) -> FastAPI:
    """Serves `models`, whose start and end are the caller's business.

    Raises: KeyFault: the keys cannot be used.
    """
    app = FastAPI(
        title="Chairlift",
        version=version("chairlift"),
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
    )
    context = app.state.context = Context(models, settings, metrics)
    metrics.registry.register(ModelsCollector(models))
    app.add_middleware(Leases)
    install_guards(app, context.keys, settings.security, _respond, settings.max_body_bytes)
    app.add_middleware(Entrance, respond=_respond)
    errors.install(app, _respond)
    install_cors(app, settings.security)
    reports = () if tracing is None else (tracing.report,)
    # Last, so that it is outermost and sees what others refuse.
    observe(app, metrics, settings.observe, reports)
    surfaces = (chat, completions, responses, messages, embeddings, tokenize)
    for routes in (models_route, *surfaces, cache, health, metrics_route, pages):
        app.include_router(routes.router)
    return app


def _respond(error: errors.APIError, scope: Scope) -> Response:
    note_error(error)
    return refusal_of(error, scope)
