"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, in Anthropic's form."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from chairlift.engine.errors import EngineError
from chairlift.engine.output.stream import ParsedStream, parsed
from chairlift.server.anthropic.context import is_due, is_worth, results_to_clear
from chairlift.server.anthropic.encoder import MessageEncoder, MessageHead, WholeMessage
from chairlift.server.anthropic.errors import error_frame
from chairlift.server.anthropic.translate import Translation, translate
from chairlift.server.beforehand import check_messages_body
from chairlift.server.body import fit, in_a_thread, parse, receive
from chairlift.server.context import Context
from chairlift.server.errors import (
    CLIENT_CLOSED_REQUEST,
    APIError,
    from_engine,
    internal_error,
    request_id_of,
)
from chairlift.server.payload import Payload, PayloadResponse
from chairlift.server.reasoning import EFFORT
from chairlift.server.routes.answer import prepare_conversation, submit
from chairlift.server.streaming import EventStream, frame, unless_gone
from chairlift.server.validation import ParsedChat, Prepared, check_chat
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.messages import CountTokensRequest, MessagesRequest
from chairlift.server.wire.parameters import CHAT, COUNT_TOKENS, MESSAGES, Surface

logger = logging.getLogger("chairlift.server")
router = APIRouter(prefix="/v1/messages")


@dataclass(slots=True)
class Ready:
    """A request that can be answered or counted."""

    wire: CountTokensRequest
    context: Context
    prepared: Prepared
    applied_edits: list[Payload] = field(default_factory=list)
    cleared_tokens: int = 0

    @property
    def tokens(self) -> int:
        return _size(self.prepared)

    def clear(self, edit: str, unit: str, count: int, tokens: int) -> None:
        """Tell of an edit of the context that took `tokens` out of the prompt."""
        self.applied_edits.append(
            {"type": f"clear_{edit}", f"cleared_{unit}": count, "cleared_input_tokens": tokens}
        )
        self.cleared_tokens += tokens


@router.post("")
async def messages(http: Request) -> Response:
    message_id = "msg_" + uuid.uuid4().hex
    ready = await _prepare(http, MessagesRequest, MESSAGES, message_id)
    wire, context = ready.wire, ready.context
    head = MessageHead(
        message_id,
        context.engine.info.name,
        ready.tokens,
        omits_thinking=wire.thinking is not None and wire.thinking.display == "omitted",
        context_management=None
        if wire.context_management is None
        else {"applied_edits": ready.applied_edits},
    )
    encoder = MessageEncoder(head)
    request_id = request_id_of(http.scope)
    headers = {"request-id": request_id, "X-Request-Id": message_id}
    (handle,) = submit(context.engine, ready.prepared.requests, "messages", tenant=context.tenant(http))
    stream = parsed(handle, ready.prepared.make_parser())
    if ready.prepared.stream:
        frames = _frames(stream, encoder, request_id)
        return EventStream([stream], frames, headers, context.settings.ping_s, _ping)
    payload = await unless_gone(http, [stream], _whole(stream, encoder))
    if payload is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return PayloadResponse(payload, headers=headers)


@router.post("/count_tokens")
async def count_tokens(http: Request) -> Response:
    ready = await _prepare(http, CountTokensRequest, COUNT_TOKENS, "count")
    payload: Payload = {"input_tokens": ready.tokens}
    if ready.wire.context_management is not None:
        payload["context_management"] = {"original_input_tokens": ready.tokens + ready.cleared_tokens}
    return PayloadResponse(payload, headers={"request-id": request_id_of(http.scope)})


async def _prepare(http: Request, form: type[CountTokensRequest], surface: Surface, request_id: str) -> Ready:
    """Raises: APIError with 4xx, which names places as the client does."""

    check = partial(check_messages_body, form=form, surface=surface)
    context, raw = await receive(http, check=in_a_thread(check))
    wire = await asyncio.to_thread(parse, raw, form, surface, context.settings.max_json_depth)
    translation = await asyncio.to_thread(translate, wire)
    prepared = await _render(translation, request_id, context)
    ready = Ready(wire, context, prepared)
    if translation.cleared:
        ready.clear(
            "thinking_20251015",
            "thinking_turns",
            len(translation.cleared),
            await asyncio.to_thread(_tokens_of, translation.cleared, context),
        )
    edit = results_to_clear(wire)
    if edit is not None and is_due(edit, ready.tokens, translation.results):
        shorter = await asyncio.to_thread(translate, wire, edit)
        without = await _render(shorter, request_id, context)
        saved = ready.tokens - _size(without)
        if is_worth(edit, saved):
            ready.prepared = without
            ready.clear("tool_uses_20250919", "tool_uses", shorter.cleared_results, saved)
    return ready


async def _render(translation: Translation, request_id: str, context: Context) -> Prepared:
    try:
        chat = await asyncio.to_thread(_check, translation, context)
        return await prepare_conversation(chat, request_id, context)
    except APIError as error:
        raise translation.relocate(error) from None


def _check(translation: Translation, context: Context) -> ParsedChat:
    engine = context.engine
    fields = dict(translation.chat)
    if not engine.tokenizer.template_mentions(EFFORT):
        # Claude Code asks every model for an effort. One that has no such setting makes the effort it makes.
        fields.pop(EFFORT, None)
    chat = fit(fields, ChatRequest, CHAT)
    return check_chat(
        chat,
        engine.tokenizer,
        engine.info,
        takes_images=engine.processor is not None,
        defaults=context.defaults,
    )


def _size(prepared: Prepared) -> int:
    return len(prepared.requests[0].prompt_token_ids)


def _tokens_of(texts: list[str], context: Context) -> int:
    encode = context.engine.tokenizer.encode
    return sum(len(encode(text, add_special_tokens=False)) for text in texts)


def _frame(payload: Payload) -> bytes:
    return frame(payload, str(payload["type"]))


async def _frames(stream: ParsedStream, encoder: MessageEncoder, request_id: str) -> AsyncGenerator[bytes]:
    """Server-sent events to the end. A failure is an `error` event, and no `message_stop` follows."""
    try:
        yield _frame(encoder.opening())
        yield _frame({"type": "ping"})
        async for event in stream:
            # One write for all that an event brings.
            payloads = [_frame(payload) for payload in encoder.encode(event)]
            if payloads:
                yield b"".join(payloads)
    except APIError as error:
        yield error_frame(error, request_id)
    except EngineError as error:
        yield error_frame(from_engine(error), request_id)
    except Exception:
        logger.exception("a stream failed")
        stream.fail()
        yield error_frame(internal_error(), request_id)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(event="ping", data='{"type":"ping"}', sep="\n")


async def _whole(stream: ParsedStream, encoder: MessageEncoder) -> Payload:
    message = WholeMessage(encoder)
    async for event in stream:
        message.add(event)
    return message.payload()
