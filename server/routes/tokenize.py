"""`POST /tokenize` and `POST /detokenize`, in vLLM's form."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.plan import ModelInfo, Tokenizer
from chairlift.server.body import parse, receive
from chairlift.server.context import Context
from chairlift.server.errors import invalid, model_not_found, unsupported
from chairlift.server.messages import characters, image_references, render
from chairlift.server.payload import PayloadResponse
from chairlift.server.reasoning import template_variables
from chairlift.server.sampling import check_vocabulary
from chairlift.server.tools import offer_of
from chairlift.server.validation import check_room
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    context, raw = await receive(request)
    return await asyncio.to_thread(_tokenize, raw, context)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    context, raw = await receive(request)
    return await asyncio.to_thread(_detokenize, raw, context)


def _tokenize(raw: bytes, context: Context) -> Response:
    engine = context.engine
    tokenizer, info, depth = engine.tokenizer, engine.info, context.settings.max_json_depth
    wire = parse(raw, TokenizeRequest, TOKENIZE, depth)
    check_model(wire.model, info)
    if (wire.prompt is None) == (wire.messages is None):
        raise invalid("Send either prompt or messages.", "prompt", "invalid_value")
    if wire.prompt is not None:
        tokens = prompt_tokens(wire, wire.prompt, tokenizer, info)
    else:
        tokens = messages_tokens(wire, context)
    return PayloadResponse(
        {
            "count": len(tokens),
            "max_model_len": info.context_length,
            "tokens": tokens,
            "token_strs": tokenizer.token_strings(tokens) if wire.return_token_strs else None,
        }
    )


def prompt_tokens(wire: TokenizeRequest, prompt: str, tokenizer: Tokenizer, info: ModelInfo) -> list[int]:
    for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
        if getattr(wire, name) is not None:
            raise invalid(f"{name} is only allowed with messages.", name, "invalid_value")
    check_room(len(prompt), "characters", info, "prompt")
    return tokenizer.encode(prompt, add_special_tokens=wire.add_special_tokens is not False)


def messages_tokens(wire: TokenizeRequest, context: Context) -> list[int]:
    """The prompt that a chat of these messages would have."""
    engine, depth = context.engine, context.settings.max_json_depth
    if wire.add_special_tokens:
        raise unsupported(
            "add_special_tokens",
            "add_special_tokens is not supported with messages: the template writes them.",
        )
    if not wire.messages:
        raise invalid("messages must hold at least one message.", "messages", "invalid_value")
    check_room(sum(map(characters, wire.messages)), "characters", engine.info, "messages")
    chat = ChatRequest(
        model=engine.info.name,
        messages=wire.messages,
        tools=wire.tools,
        chat_template_kwargs=wire.chat_template_kwargs,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=wire.continue_final_message,
    )
    if images := image_references(chat):
        where = images[0].param
        raise invalid(f"{where} is an image, which is not tokenized here.", where, "unsupported_value")
    tokens, _ = render(
        chat,
        (),
        engine.tokenizer,
        engine.processor,
        depth,
        tools=offer_of(chat).tools,
        variables=template_variables(chat, engine.tokenizer, context.output),
    )
    return tokens


def _detokenize(raw: bytes, context: Context) -> Response:
    tokenizer, info = context.engine.tokenizer, context.engine.info
    wire = parse(raw, DetokenizeRequest, DETOKENIZE, context.settings.max_json_depth)
    check_model(wire.model, info)
    check_room(len(wire.tokens), "tokens", info, "tokens")
    check_vocabulary(tuple(wire.tokens), tokenizer, "tokens")
    return PayloadResponse({"prompt": tokenizer.decode(wire.tokens)})


def check_model(name: str | None, info: ModelInfo) -> None:
    if name is not None and name != info.name:
        raise model_not_found(name)
