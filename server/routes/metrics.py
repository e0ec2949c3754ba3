"""`GET /metrics`, in Prometheus' text format.

Whatever the client accepts: where OpenMetrics is asked for, as Prometheus does, prometheus-client 0.26 writes
the colon of our names as an underscore, and dashboards would find nothing.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import Response

from chairlift.server.context import context_of

router = APIRouter()


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = generate_latest(context_of(request).metrics.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
