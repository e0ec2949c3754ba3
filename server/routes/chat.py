"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.encoders import ChatEncoder, Envelope
from chairlift.server.logprobs import TokenTexts
from chairlift.server.routes.answer import answer
from chairlift.server.validation import Prepared, prepare_chat

router = APIRouter()


def _encoder(envelope: Envelope, texts: TokenTexts, prepared: Prepared) -> ChatEncoder:
    logprobs = prepared.requests[0].sampling.logprobs is not None
    return ChatEncoder(envelope, texts, logprobs=logprobs, include_usage=prepared.include_usage)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await answer(request, "chatcmpl-", "messages", prepare_chat, _encoder)
