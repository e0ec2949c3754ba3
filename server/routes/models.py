"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from chairlift.server.context import context_of
from chairlift.server.errors import model_not_found
from chairlift.server.wire.models import ModelCard, ModelList

router = APIRouter(prefix="/v1/models")


@router.head("", include_in_schema=False)
@router.get("")
async def list_models(request: Request) -> ModelList:
    context = context_of(request)
    context.admit()
    return ModelList(data=[ModelCard.of(context.engine.info)])


@router.head("/{model_id:path}", include_in_schema=False)
@router.get("/{model_id:path}")
async def retrieve_model(model_id: str, request: Request) -> ModelCard:
    """Names of the form org/name are one id, escaped or not."""
    context = context_of(request)
    context.admit()
    if model_id != context.engine.info.name:
        raise model_not_found(model_id)
    return ModelCard.of(context.engine.info)
