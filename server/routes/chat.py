"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.context import Context
from chairlift.server.encoders import ChatEncoder, Envelope
from chairlift.server.logprobs import TokenTexts
from chairlift.server.routes.answer import answer
from chairlift.server.validation import Prepared, parse_chat, prepare_chat

router = APIRouter()


def _encoder(envelope: Envelope, texts: TokenTexts, prepared: Prepared) -> ChatEncoder:
    logprobs = prepared.requests[0].sampling.logprobs is not None
    return ChatEncoder(envelope, texts, logprobs=logprobs, include_usage=prepared.include_usage)


async def _prepare(raw: bytes, request_id: str, context: Context) -> Prepared:
    engine, settings = context.engine, context.settings
    takes_images = engine.processor is not None
    chat = await asyncio.to_thread(
        parse_chat, raw, engine.tokenizer, engine.info, settings, takes_images=takes_images
    )
    prepare = partial(
        prepare_chat,
        chat,
        request_id=request_id,
        tokenizer=engine.tokenizer,
        processor=engine.processor,
        settings=settings,
    )
    if not chat.images:
        return await asyncio.to_thread(prepare, ())
    files = await context.images.read(chat.images)
    async with context.images.turn:
        prepared = await asyncio.to_thread(prepare, await context.images.decode(chat.images, files))
    for request in prepared.requests:
        if request.media is not None:
            context.images.budget.take(request.media)
    return prepared


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await answer(request, "chatcmpl-", "messages", _prepare, _encoder)
