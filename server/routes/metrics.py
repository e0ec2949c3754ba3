"""`GET /metrics`, in Prometheus' text format or OpenMetrics, as asked for."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from chairlift.server.context import context_of

router = APIRouter()


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(context_of(request).metrics.registry), headers={"Content-Type": content_type})
