"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from chairlift.server.anthropic.errors import is_anthropic
from chairlift.server.context import context_of
from chairlift.server.errors import model_not_found, request_id_of
from chairlift.server.wire.models import AnthropicModelCard, AnthropicModelList, ModelCard, ModelList

router = APIRouter(prefix="/v1/models")


@router.head("", include_in_schema=False)
@router.get("")
async def list_models(request: Request, response: Response) -> ModelList | AnthropicModelList:
    context = context_of(request)
    context.admit()
    if is_anthropic(request.scope):
        response.headers["request-id"] = request_id_of(request.scope)
        # One page holds all models; before its first and after its last there are none.
        edges = (request.query_params.get("before_id"), request.query_params.get("after_id"))
        generation = [] if any(edges) or context.generation is None else [context.generation]
        cards = [AnthropicModelCard.of(engine.info) for engine in generation]
        return AnthropicModelList.of(cards)
    return ModelList(data=[ModelCard.of(engine.info) for engine in context.engines])


@router.head("/{model_id:path}", include_in_schema=False)
@router.get("/{model_id:path}")
async def retrieve_model(
    model_id: str, request: Request, response: Response
) -> ModelCard | AnthropicModelCard:
    """Names of the form org/name are one id, escaped or not."""
    context = context_of(request)
    context.admit()
    generation = context.generation
    if is_anthropic(request.scope) and generation is not None and model_id == generation.info.name:
        response.headers["request-id"] = request_id_of(request.scope)
        return AnthropicModelCard.of(generation.info)
    for engine in context.engines:
        if model_id == engine.info.name and not is_anthropic(request.scope):
            return ModelCard.of(engine.info)
    raise model_not_found(model_id)
