"""What chat and text completions do alike: read, prepare, submit, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request as HTTPRequest
from starlette.responses import Response

from chairlift.engine.engine import Engine, RequestHandle
from chairlift.engine.errors import ContextLengthExceeded, MemoryExceeded
from chairlift.engine.output.stream import parsed
from chairlift.engine.request import Request
from chairlift.server.body import Check, receive
from chairlift.server.context import Context
from chairlift.server.encoders import Encoder, Envelope
from chairlift.server.errors import invalid, request_id_of
from chairlift.server.logprobs import TokenTexts
from chairlift.server.observe.record import note_submitted
from chairlift.server.streaming import EventStream, chunks, whole_response
from chairlift.server.validation import ParsedChat, Prepared, prepare_chat

Prepare = Callable[[bytes, str, Context], Awaitable[Prepared]]
"""From a body and the answer's id. What takes time of the processor is done in threads, however short the
body: tokenizing takes turns, and the event loop must not wait for its turn behind somebody's long prompt."""
MakeEncoder = Callable[[Envelope, TokenTexts | None, Prepared, Sequence[RequestHandle]], Encoder]


async def answer(
    http: HTTPRequest,
    prefix: str,
    prompt_param: str,
    check: Check,
    prepare: Prepare,
    make_encoder: MakeEncoder,
) -> Response:
    """`prefix`: of the answer's id. `prompt_param`: the parameter that a too long prompt is blamed on."""
    context, raw = await receive(http, check=check)
    engine = context.engine
    request_id = request_id_of(http.scope, prefix)
    prepared = await prepare(raw, request_id, context)
    texts = await asyncio.to_thread(lambda: context.token_texts) if prepared.logprobs else None
    envelope = Envelope(request_id, engine.info.name, int(time.time()), context.fingerprint)
    headers = {"X-Request-Id": request_id}
    tenant = context.tenant(http)
    handles = submit(engine, prepared.requests, prompt_param, each=prepared.choices.drawn, tenant=tenant)
    encoder = make_encoder(envelope, texts, prepared, handles)
    streams = [parsed(handle, prepared.make_parser()) for handle in handles]
    if prepared.stream:
        return EventStream(streams, chunks(streams, encoder), headers, context.settings.ping_s)
    return await whole_response(http, streams, encoder, headers)


async def prepare_conversation(chat: ParsedChat, request_id: str, context: Context) -> Prepared:
    """Reads its images, then renders it. Raises: APIError with 4xx."""
    engine = context.engine
    prepare = partial(
        prepare_chat,
        chat,
        request_id=request_id,
        tokenizer=engine.tokenizer,
        processor=engine.processor,
        settings=context.settings,
        output=context.output,
        compiler=engine.constraints,
    )
    if not chat.images:
        return await asyncio.to_thread(prepare, ())
    files = await context.images.read(chat.images)
    async with context.images.turn:
        prepared = await asyncio.to_thread(prepare, await context.images.decode(chat.images, files))
    media = prepared.requests[0].media  # all answers to the conversation share them
    if media is not None:
        context.images.budget.take(media)
    return prepared


def submit(
    engine: Engine, requests: Sequence[Request], prompt_param: str, *, each: int = 1, tenant: str = ""
) -> list[RequestHandle]:
    """All of them or none; `each` of them to a prompt. `tenant`: whose prefixes they may share.

    Raises: EngineError; APIError for a prompt that is too long."""
    handles: list[RequestHandle] = []
    try:
        for request in requests:
            handles.append(engine.submit(replace(request, cache_salt=tenant + request.cache_salt)))
    except BaseException as error:
        for handle in handles:
            handle.cancel()
        if isinstance(error, ContextLengthExceeded):
            several = len(requests) > each
            param = f"{prompt_param}[{len(handles) // each}]" if several else prompt_param
            if isinstance(error, MemoryExceeded) and error.param != "prompt":
                param = error.param
            raise invalid(error.message, param, "context_length_exceeded") from None
        raise
    note_submitted(engine.info.name, handles, each)
    return handles
