"""`DELETE /v1/cache`: what is kept of earlier requests goes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.context import context_of
from chairlift.server.payload import PayloadResponse
from chairlift.server.responses.queries import Query

router = APIRouter()


@router.delete("/v1/cache")
async def clear(request: Request) -> Response:
    """With `disk=true` the model's files, too. Memory has gone back to the system when this answers."""
    context = context_of(request)
    context.administer(request)
    query = Query(request, "disk")
    disk = query.boolean("disk")
    context.admit()
    cleared = await context.engine.clear_cache(disk=disk)
    return PayloadResponse(
        {"object": "cache.cleared", "memory_bytes": cleared.memory, "disk_bytes": cleared.disk}
    )
