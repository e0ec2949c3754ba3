"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.engine import RequestHandle
from chairlift.server.beforehand import check_completion_body
from chairlift.server.body import in_a_thread
from chairlift.server.context import Context
from chairlift.server.encoders import CompletionEncoder, Envelope
from chairlift.server.logprobs import TokenTexts
from chairlift.server.routes.answer import answer
from chairlift.server.validation import Prepared, prepare_completions

router = APIRouter()


def _encoder(
    envelope: Envelope, texts: TokenTexts | None, prepared: Prepared, handles: Sequence[RequestHandle]
) -> CompletionEncoder:
    return CompletionEncoder(
        envelope,
        texts,
        include_usage=prepared.include_usage,
        echoes=prepared.echoes,
        choices=prepared.choices,
        scored=handles,
        silent=prepared.silent,
    )


async def _prepare(raw: bytes, request_id: str, context: Context) -> Prepared:
    engine = context.engine
    return await asyncio.to_thread(
        prepare_completions,
        raw,
        request_id,
        engine.tokenizer,
        engine.info,
        context.settings,
        engine.constraints,
        context.defaults,
    )


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await answer(request, "cmpl-", "prompt", in_a_thread(check_completion_body), _prepare, _encoder)
