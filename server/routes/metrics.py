"""`GET /metrics`, in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.context import context_of
from chairlift.server.metrics.exposition import CONTENT_TYPE, exposition

router = APIRouter()


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    context = context_of(request)
    text = exposition(context.metrics.registry, vllm=context.settings.observe.vllm_names)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})
