"""`GET /openapi.json`, and `GET /docs` to read and try it: nothing is loaded from elsewhere, the page's files
come with a package (`fastapi-offline`, of which no code is used)."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response

from chairlift.server.errors import APIError
from chairlift.server.openapi.document import openapi
from chairlift.server.payload import dump

router = APIRouter(include_in_schema=False)
FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}


@cache
def _document() -> bytes:
    return dump(openapi("Chairlift", version("chairlift")))


@router.head("/openapi.json")
@router.get("/openapi.json")
async def description() -> Response:
    return Response(await asyncio.to_thread(_document), media_type="application/json")


@router.head("/")
@router.get("/")
@router.head("/docs")
@router.get("/docs")
async def docs(request: Request) -> Response:
    """At the root, too: people open a base URL, and Claude Code asks for its head before it begins. Addresses
    are relative, since a proxy may serve all this below a path of its own."""
    here = "../" if request.scope["raw_path"].endswith(b"/docs/") else ""
    return get_swagger_ui_html(
        openapi_url=f"{here}openapi.json",
        title="Chairlift",
        swagger_js_url=f"{here}docs/swagger-ui-bundle.js",
        swagger_css_url=f"{here}docs/swagger-ui.css",
        swagger_favicon_url=f"{here}docs/favicon.png",
    )


@router.head("/docs/{name}")
@router.get("/docs/{name}")
async def file(name: str) -> Response:
    if name not in FILES:
        raise APIError(404, "There is no such page.", code="unknown_url")
    content = await asyncio.to_thread(files("fastapi_offline").joinpath("static", name).read_bytes)
    return Response(content, media_type=FILES[name], headers={"Cache-Control": "max-age=86400"})
