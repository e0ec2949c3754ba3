"""`GET /v1/models` and `GET /v1/models/{id}`; for operators, `POST /v1/models/load` and `/unload`."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from chairlift.server.anthropic.errors import is_anthropic
from chairlift.server.body import check_form, parse, read_body
from chairlift.server.context import Context, context_of
from chairlift.server.errors import (
    CLIENT_CLOSED_REQUEST,
    APIError,
    model_not_found,
    request_id_of,
    unsupported,
)
from chairlift.server.models.model import Model, Use
from chairlift.server.query import Query
from chairlift.server.streaming import unless_gone
from chairlift.server.wire.models import (
    OPERATE,
    AnthropicModelCard,
    AnthropicModelList,
    LoadRequest,
    ModelCard,
    ModelList,
    UnloadRequest,
)

W = TypeVar("W", bound=LoadRequest)

router = APIRouter(prefix="/v1/models")
PAGING = ("limit", "after_id", "before_id")
PAGE = 20
"""Models on a page; Anthropic's default."""


@router.head("", include_in_schema=False)
@router.get("")
async def list_models(request: Request, response: Response) -> ModelList | AnthropicModelList:
    context = context_of(request)
    context.models.require_open()  # models that load are told of, too
    if is_anthropic(request.scope):
        response.headers["request-id"] = request_id_of(request.scope)
        cards = [AnthropicModelCard.of(model) for model in _generating(context)]
        return _page(cards, Query(request))
    for name in PAGING:
        if name in request.query_params:
            raise unsupported(name, f"{name} is known with the header anthropic-version only.")
    return ModelList(data=[ModelCard.of(model) for model in context.models])


def _page(cards: list[AnthropicModelCard], query: Query) -> AnthropicModelList:
    """Raises: APIError: 400."""
    limit = query.integer("limit", least=1, most=1000) or PAGE
    ids = [card.id for card in cards]
    places: dict[str, int] = {}
    for name in ("after_id", "before_id"):
        if (id := query.text(name)) is not None:
            if id not in ids:
                raise query.refused(name, "is no model of this list")
            places[name] = ids.index(id)
    if len(places) > 1:
        raise query.refused("before_id", "and after_id exclude each other")
    if "before_id" in places:
        before = cards[: places["before_id"]]
        return AnthropicModelList.of(before[-limit:], has_more=len(before) > limit)
    after = cards[places["after_id"] + 1 :] if places else cards
    return AnthropicModelList.of(after[:limit], has_more=len(after) > limit)


@router.head("/{model_id:path}", include_in_schema=False)
@router.get("/{model_id:path}")
async def retrieve_model(
    model_id: str, request: Request, response: Response
) -> ModelCard | AnthropicModelCard:
    """Names of the form org/name are one id, escaped or not."""
    context = context_of(request)
    context.models.require_open()  # models that load are told of, too
    model = context.models.find(model_id)
    if model is None or (is_anthropic(request.scope) and model not in _generating(context)):
        raise model_not_found(model_id)
    if is_anthropic(request.scope):
        response.headers["request-id"] = request_id_of(request.scope)
        return AnthropicModelCard.of(model)
    return ModelCard.of(model)


def _generating(context: Context) -> list[Model]:
    return [model for model in context.models if model.use in (Use.GENERATION, None)]


@router.post("/load")
async def load(request: Request) -> ModelCard:
    """Answers once it is loaded, or cannot be."""
    context, wire = await _asked(request, LoadRequest)
    model = _named(context, wire.model)
    if await unless_gone(request, (), _loaded(context, model)) is None:
        raise APIError(CLIENT_CLOSED_REQUEST, "The client left.")
    return ModelCard.of(model)


async def _loaded(context: Context, model: Model) -> bool:
    await context.models.load(model)
    return True


@router.post("/unload")
async def unload(request: Request) -> ModelCard:
    """Answers once its memory is free."""
    context, wire = await _asked(request, UnloadRequest)
    model = _named(context, wire.model)
    await context.models.unload(model, force=bool(wire.force))
    return ModelCard.of(model)


async def _asked(request: Request, form: type[W]) -> tuple[Context, W]:
    context = context_of(request)
    context.administer(request)
    context.admit()
    check_form(request)
    settings = context.settings
    raw = await read_body(request, settings.max_body_bytes, settings.body_patience_s)
    return context, await asyncio.to_thread(parse, raw, form, OPERATE, settings.max_json_depth)


def _named(context: Context, name: str) -> Model:
    model = context.models.find(name)
    if model is None:
        raise model_not_found(name)
    return model
