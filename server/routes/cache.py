"""`DELETE /v1/cache`: kept prefixes go. `POST /v1/cache/warm`: one comes, and stays."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.engine import Engine
from chairlift.server.body import in_a_thread, parse, receive
from chairlift.server.context import Context, context_of
from chairlift.server.errors import invalid, model_not_found
from chairlift.server.payload import PayloadResponse
from chairlift.server.query import Query
from chairlift.server.routes.tokenize import check_tokenize, messages_tokens, prompt_tokens
from chairlift.server.wire.cache import WARM, WarmRequest
from chairlift.server.wire.tokenize import TokenizeRequest

router = APIRouter()


@router.delete("/v1/cache")
async def clear(request: Request) -> Response:
    """Of one model, or of all; with `disk=true` their files, too. Memory has gone back to the system then."""
    context = context_of(request)
    context.administer(request)
    query = Query(request)
    disk, name = query.boolean("disk"), query.text("model")
    context.admit()
    memory_bytes = disk_bytes = 0
    for engine in _engines(context, name):
        cleared = await engine.clear_cache(disk=disk)
        memory_bytes += cleared.memory
        disk_bytes += cleared.disk
    return PayloadResponse(
        {"object": "cache.cleared", "memory_bytes": memory_bytes, "disk_bytes": disk_bytes}
    )


def _engines(context: Context, name: str | None) -> list[Engine]:
    """Of the model of this name, or of all that generate text; only those that are loaded keep anything.

    Raises: APIError: 404: there is none, or none of this name; 400: it generates no text."""
    if name is None:
        ready = (model.engine for model in context.models if model.ready)
        engines = [engine for engine in ready if isinstance(engine, Engine)]
        return engines or [context.engine]
    model = context.models.find(name)
    if model is None:
        raise model_not_found(name)
    if not model.ready:
        return []
    return [context.of(model).engine]


@router.post("/v1/cache/warm")
async def warm(request: Request) -> Response:
    """Answers once the prefix is there."""
    context_of(request).administer(request)
    context, raw = await receive(request, check=in_a_thread(_read))
    tokens, salt = await asyncio.to_thread(_prefix, raw, context)
    pinned = await context.engine.warm(tokens, context.tenant(request) + salt)
    stats = context.engine.stats().prefix
    return PayloadResponse(
        {
            "object": "cache.warmed",
            "tokens": len(tokens),
            "pinned_tokens": pinned,
            "pinned_bytes": stats.pinned_bytes,
        }
    )


def _read(raw: bytes, context: Context) -> tuple[TokenizeRequest, str]:
    """What prompts are to begin with, and whose they are. Takes no model. Raises: APIError with 4xx."""
    depth = context.settings.max_json_depth
    wire = parse(raw, WarmRequest, WARM, depth)
    asked = TokenizeRequest(
        prompt=wire.prompt,
        messages=wire.messages,
        add_special_tokens=wire.add_special_tokens,
        add_generation_prompt=None if wire.messages is None else False,
        tools=wire.tools,
        chat_template_kwargs=wire.chat_template_kwargs,
    )
    check_tokenize(asked, depth)
    return asked, wire.cache_salt or ""


def _prefix(raw: bytes, context: Context) -> tuple[list[int], str]:
    """The same in tokens."""
    asked, salt = _read(raw, context)
    engine = context.engine
    if asked.prompt is not None:
        tokens = prompt_tokens(asked, asked.prompt, engine.tokenizer, engine.info)
    else:
        assert asked.messages is not None
        tokens = messages_tokens(asked, asked.messages, context)
    if not tokens:
        raise invalid("The prompt holds no tokens.", "prompt", "invalid_value")
    return tokens, salt
