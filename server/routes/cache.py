"""`DELETE /v1/cache`: kept prefixes go. `POST /v1/cache/warm`: one comes, and stays."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.body import parse, receive
from chairlift.server.context import Context, context_of
from chairlift.server.errors import invalid
from chairlift.server.payload import PayloadResponse
from chairlift.server.query import Query
from chairlift.server.routes.tokenize import check_model, messages_tokens, prompt_tokens
from chairlift.server.wire.cache import WARM, WarmRequest
from chairlift.server.wire.tokenize import TokenizeRequest

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


@router.post("/v1/cache/warm")
async def warm(request: Request) -> Response:
    """Answers once the prefix is there."""
    context_of(request).administer(request)
    context, raw = await receive(request)
    tokens, salt = await asyncio.to_thread(_prefix, raw, context)
    pinned = await context.engine.warm(tokens, salt)
    stats = context.engine.stats().prefix
    return PayloadResponse(
        {
            "object": "cache.warmed",
            "tokens": len(tokens),
            "pinned_tokens": pinned,
            "pinned_bytes": stats.pinned_bytes,
        }
    )


def _prefix(raw: bytes, context: Context) -> tuple[list[int], str]:
    """The tokens that prompts are to begin with, and whose they are."""
    engine = context.engine
    wire = parse(raw, WarmRequest, WARM, context.settings.max_json_depth)
    check_model(wire.model, engine.info)
    if (wire.prompt is None) == (wire.messages is None):
        raise invalid("Send either prompt or messages.", "prompt", "invalid_value")
    asked = TokenizeRequest(
        prompt=wire.prompt,
        messages=wire.messages,
        add_special_tokens=wire.add_special_tokens,
        add_generation_prompt=None if wire.messages is None else False,
        tools=wire.tools,
        chat_template_kwargs=wire.chat_template_kwargs,
    )
    if wire.prompt is not None:
        tokens = prompt_tokens(asked, wire.prompt, engine.tokenizer, engine.info)
    else:
        tokens = messages_tokens(asked, context)
    if not tokens:
        raise invalid("The prompt holds no tokens.", "prompt", "invalid_value")
    return tokens, wire.cache_salt or ""
