"""`/v1/responses`: create, retrieve, delete, cancel, and list what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import get_args

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.engine.output.stream import parsed
from chairlift.server.beforehand import check_chat_wire
from chairlift.server.body import receive
from chairlift.server.context import Context, context_of
from chairlift.server.errors import CLIENT_CLOSED_REQUEST
from chairlift.server.payload import Payload, PayloadResponse
from chairlift.server.query import Query
from chairlift.server.responses.answering import Answering
from chairlift.server.responses.asking import Asked, read
from chairlift.server.responses.caller import Caller
from chairlift.server.responses.encoder import ResponseEncoder
from chairlift.server.responses.fitting import prepare
from chairlift.server.responses.items import new_id
from chairlift.server.responses.registry import Responses
from chairlift.server.routes.answer import submit
from chairlift.server.streaming import EventStream, frame, unless_gone
from chairlift.server.wire.parameters import INPUT_TOKENS, RESPONSES, Surface
from chairlift.server.wire.responses import Includable

router = APIRouter(prefix="/v1/responses")
INCLUDABLE = get_args(Includable)
"""What a query may ask for; it is there anyway."""


class ResponseStream(EventStream):
    """A stream of one response's events; when its reader leaves, the response ends."""

    def __init__(self, responses: Responses, answering: Answering, headers: dict[str, str], ping_s: float):
        super().__init__((answering.stream,), frames(answering.events()), headers, ping_s)
        self._responses = responses
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._responses.leave(self._answering)


async def frames(events: AsyncGenerator[Payload]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for event in events:
            yield frame(event, str(event["type"]))


@router.post("")
async def create(http: Request) -> Response:
    context, raw = await receive(http, check=partial(_check, http, RESPONSES))
    caller = context.caller(http)
    asked = await read(raw, context, caller)
    answering = await _begin(asked, context, caller, context.tenant(http))
    headers = {"X-Request-Id": answering.id}
    responses, wire = context.responses, asked.wire
    if answering.background:
        try:
            await responses.start(answering)
        except BaseException:
            answering.stream.cancel()
            raise
        if not wire.stream:
            return PayloadResponse(answering.snapshot, headers=headers)
        return EventStream((), frames(answering.follow(-1)), headers, context.settings.ping_s)
    responses.enter(answering)
    if wire.stream:
        return ResponseStream(responses, answering, headers, context.settings.ping_s)
    try:
        response = await unless_gone(http, (answering.stream,), _whole(answering))
        if response is None:
            answering.forget()  # nobody knows its id
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        responses.leave(answering)
    return PayloadResponse(response, headers=headers)


async def _check(http: Request, surface: Surface, raw: bytes, context: Context) -> None:
    """Before a model is loaded for it. Raises: APIError with 4xx."""
    asked = await read(raw, context, context.caller(http), surface)
    with asked.translation.in_its_words():
        await asyncio.to_thread(check_chat_wire, asked.translation.chat, context)


async def _begin(asked: Asked, context: Context, caller: Caller, tenant: str) -> Answering:
    """Raises: APIError; EngineError."""
    wire, engine = asked.wire, context.engine
    id = new_id("resp")
    prepared = await prepare(asked.translation, id, context, truncate=wire.truncation == "auto")
    texts = await asyncio.to_thread(lambda: context.token_texts) if asked.logprobs else None
    (handle,) = submit(engine, prepared.requests, "input", tenant=tenant)
    encoder = ResponseEncoder(
        asked.base(id, engine.info.name, prepared.requests[0].sampling),
        texts,
        summarize=asked.summarize,
        seal_reasoning=asked.seal_reasoning,
    )
    return Answering(
        id,
        parsed(handle, prepared.make_parser()),
        encoder,
        asked.conversation,
        context.responses.store if asked.store else None,
        caller.tenant,
        background=bool(wire.background),
        keeps_events=bool(wire.background and wire.stream),
    )


async def _whole(answering: Answering) -> Payload:
    """Raises: EngineError: why it failed."""
    async with aclosing(answering.events()) as events:
        async for _ in events:
            pass
    if answering.error is not None:
        raise answering.error
    assert answering.response is not None
    return answering.response


@router.post("/input_tokens")
async def input_tokens(http: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    context, raw = await receive(http, check=partial(_check, http, INPUT_TOKENS))
    asked = await read(raw, context, context.caller(http), INPUT_TOKENS)
    truncate = asked.wire.truncation == "auto"
    prepared = await prepare(asked.translation, new_id("resp"), context, truncate=truncate)
    count = len(prepared.requests[0].prompt_token_ids)
    return PayloadResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/{response_id}")
async def retrieve(response_id: str, http: Request) -> Response:
    context = context_of(http)
    caller = context.caller(http)
    query = Query(http)
    query.check_list("include", INCLUDABLE)
    query.boolean("include_obfuscation")
    after = query.integer("starting_after", least=0)
    if query.boolean("stream"):
        events = await context.responses.follow(response_id, -1 if after is None else after, caller)
        return EventStream((), frames(events), {}, context.settings.ping_s)
    if after is not None:
        raise query.refused("starting_after", "is only allowed when stream is true")
    return PayloadResponse(await context.responses.retrieve(response_id, caller))


@router.delete("/{response_id}")
async def delete(response_id: str, http: Request) -> Response:
    context = context_of(http)
    await context.responses.delete(response_id, context.caller(http))
    return PayloadResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/{response_id}/cancel")
async def cancel(response_id: str, http: Request) -> Response:
    context = context_of(http)
    return PayloadResponse(await context.responses.cancel(response_id, context.caller(http)))


@router.get("/{response_id}/input_items")
async def input_items(response_id: str, http: Request) -> Response:
    query = Query(http)
    query.check_list("include", INCLUDABLE)
    limit = query.integer("limit", least=1, most=100)
    order = query.one_of("order", ("asc", "desc"))
    after = query.text("after")
    context = context_of(http)
    items = list(await context.responses.input_items(response_id, context.caller(http)))
    if order != "asc":
        items.reverse()
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise query.refused("after", "is no item of this response")
        items = items[place + 1 :]
    page = items[: 20 if limit is None else limit]
    return PayloadResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )
