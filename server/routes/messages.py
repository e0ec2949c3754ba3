"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's form."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from typing import TypeVar

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from chairlift.engine.errors import EngineError
from chairlift.engine.output.stream import ParsedStream, parsed
from chairlift.engine.plan import Tokenizer
from chairlift.server.anthropic.encoder import MessageEncoder, MessageHead, Payload, WholeMessage
from chairlift.server.anthropic.errors import error_frame, request_id_of
from chairlift.server.anthropic.translate import Translation, translate
from chairlift.server.body import fit, parse, read_body
from chairlift.server.context import Context, context_of
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, from_engine, internal_error
from chairlift.server.payload import PayloadResponse, dump
from chairlift.server.routes.answer import prepare_conversation, submit
from chairlift.server.streaming import EventStream, unless_gone
from chairlift.server.validation import ParsedChat, Prepared, check_chat
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.messages import CountTokensRequest, MessagesRequest
from chairlift.server.wire.parameters import CHAT, COUNT_TOKENS, MESSAGES, Surface

logger = logging.getLogger("chairlift.server")
router = APIRouter(prefix="/v1/messages")

W = TypeVar("W", bound=CountTokensRequest)


@router.post("")
async def messages(http: Request) -> Response:
    context = context_of(http)
    message_id = "msg_" + uuid.uuid4().hex
    wire, translation, prepared = await _prepare(http, MessagesRequest, MESSAGES, message_id)
    (request,) = prepared.requests
    thinking = wire.thinking
    head = MessageHead(
        message_id,
        context.engine.info.name,
        len(request.prompt_token_ids),
        omits_thinking=thinking is not None and thinking.display == "omitted",
        context_management=await _applied_edits(wire, translation, context.engine.tokenizer),
    )
    encoder = MessageEncoder(head)
    request_id = request_id_of(http.scope)
    headers = {"request-id": request_id, "X-Request-Id": message_id}
    (handle,) = submit(context.engine, prepared.requests, "messages")
    stream = parsed(handle, prepared.make_parser())
    if prepared.stream:
        frames = _frames(stream, encoder, request_id)
        return EventStream([stream], frames, headers, context.settings.ping_s, _ping)
    payload = await unless_gone(http, [stream], _whole(stream, encoder))
    if payload is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return PayloadResponse(payload, headers=headers)


@router.post("/count_tokens")
async def count_tokens(http: Request) -> Response:
    wire, translation, prepared = await _prepare(http, CountTokensRequest, COUNT_TOKENS, "count")
    tokens = len(prepared.requests[0].prompt_token_ids)
    payload: Payload = {"input_tokens": tokens}
    if wire.context_management is not None:
        cleared = await asyncio.to_thread(_cleared_tokens, translation, context_of(http).engine.tokenizer)
        payload["context_management"] = {"original_input_tokens": tokens + cleared}
    return PayloadResponse(payload, headers={"request-id": request_id_of(http.scope)})


async def _prepare(
    http: Request, form: type[W], surface: Surface, request_id: str
) -> tuple[W, Translation, Prepared]:
    """Raises: APIError with 4xx, which names places as the client does."""
    context = context_of(http)
    context.admit()
    settings = context.settings
    raw = await read_body(http, settings.max_body_bytes, settings.body_patience_s)
    wire = await asyncio.to_thread(parse, raw, form, surface, settings.max_json_depth)
    translation = await asyncio.to_thread(translate, wire)
    try:
        chat = await asyncio.to_thread(_check, translation, context)
        return wire, translation, await prepare_conversation(chat, request_id, context)
    except APIError as error:
        raise translation.relocate(error) from None


def _check(translation: Translation, context: Context) -> ParsedChat:
    engine = context.engine
    chat = fit(translation.chat, ChatRequest, CHAT)
    return check_chat(chat, engine.tokenizer, engine.info, takes_images=engine.processor is not None)


async def _applied_edits(
    wire: CountTokensRequest, translation: Translation, tokenizer: Tokenizer
) -> Payload | None:
    if wire.context_management is None:
        return None
    if not translation.cleared:
        return {"applied_edits": []}
    edit = {
        "type": "clear_thinking_20251015",
        "cleared_thinking_turns": len(translation.cleared),
        "cleared_input_tokens": await asyncio.to_thread(_cleared_tokens, translation, tokenizer),
    }
    return {"applied_edits": [edit]}


def _cleared_tokens(translation: Translation, tokenizer: Tokenizer) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in translation.cleared)


def frame(payload: Payload) -> bytes:
    return f"event: {payload['type']}\n".encode() + b"data: " + dump(payload) + b"\n\n"


async def _frames(stream: ParsedStream, encoder: MessageEncoder, request_id: str) -> AsyncGenerator[bytes]:
    """Server-sent events to the end. A failure is an `error` event, and no `message_stop` follows."""
    try:
        yield frame(encoder.opening())
        yield frame({"type": "ping"})
        async for event in stream:
            # One write for all that an event brings.
            payloads = [frame(payload) for payload in encoder.encode(event)]
            if payloads:
                yield b"".join(payloads)
    except APIError as error:
        yield error_frame(error, request_id)
    except EngineError as error:
        yield error_frame(from_engine(error), request_id)
    except Exception:
        logger.exception("a stream failed")
        yield error_frame(internal_error(), request_id)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n")


async def _whole(stream: ParsedStream, encoder: MessageEncoder) -> Payload:
    message = WholeMessage(encoder)
    async for event in stream:
        message.add(event)
    return message.payload()
