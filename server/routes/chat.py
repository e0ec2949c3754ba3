"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.engine import RequestHandle
from chairlift.server.beforehand import check_chat_body
from chairlift.server.body import in_a_thread
from chairlift.server.context import Context
from chairlift.server.encoders import ChatEncoder, Envelope
from chairlift.server.logprobs import TokenTexts
from chairlift.server.routes.answer import answer, prepare_conversation
from chairlift.server.validation import Prepared, parse_chat

router = APIRouter()


def _encoder(
    envelope: Envelope, texts: TokenTexts | None, prepared: Prepared, _: Sequence[RequestHandle]
) -> ChatEncoder:
    return ChatEncoder(
        envelope,
        texts,
        include_usage=prepared.include_usage,
        choices=prepared.choices.shown,
        include_reasoning=prepared.include_reasoning,
        may_call=prepared.may_call,
    )


async def _prepare(raw: bytes, request_id: str, context: Context) -> Prepared:
    engine = context.engine
    takes_images = engine.processor is not None
    chat = await asyncio.to_thread(
        parse_chat,
        raw,
        engine.tokenizer,
        engine.info,
        context.settings,
        takes_images=takes_images,
        defaults=context.defaults,
    )
    return await prepare_conversation(chat, request_id, context)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await answer(request, "chatcmpl-", "messages", in_a_thread(check_chat_body), _prepare, _encoder)
