"""`POST /tokenize` and `POST /detokenize`, in vLLM's form."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.engine.plan import ModelInfo, Tokenizer
from chairlift.server.body import in_a_thread, parse, receive
from chairlift.server.context import Context
from chairlift.server.errors import invalid, unsupported
from chairlift.server.messages import characters, check_messages, image_references, render
from chairlift.server.payload import PayloadResponse
from chairlift.server.reasoning import asked_to_think, template_variables
from chairlift.server.sampling import check_vocabulary
from chairlift.server.tools import offer_of
from chairlift.server.validation import check_room
from chairlift.server.wire.chat import ChatRequest, Message
from chairlift.server.wire.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    context, raw = await receive(request, check=in_a_thread(_read_tokenize))
    return await asyncio.to_thread(_tokenize, raw, context)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    context, raw = await receive(request, check=in_a_thread(_read_detokenize))
    return await asyncio.to_thread(_detokenize, raw, context)


def _read_tokenize(raw: bytes, context: Context) -> TokenizeRequest:
    """What takes no model. Raises: APIError with 4xx."""
    wire = parse(raw, TokenizeRequest, TOKENIZE, context.settings.max_json_depth)
    check_tokenize(wire, context.settings.max_json_depth)
    return wire


def check_tokenize(wire: TokenizeRequest, max_depth: int) -> None:
    """Raises: APIError: 400, whatever the model."""
    if (wire.prompt is None) == (wire.messages is None):
        raise invalid("Send either prompt or messages.", "prompt", "invalid_value")
    if wire.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(wire, name) is not None:
                raise invalid(f"{name} is only allowed with messages.", name, "invalid_value")
        return
    if wire.add_special_tokens:
        raise unsupported(
            "add_special_tokens",
            "add_special_tokens is not supported with messages: the template writes them.",
        )
    if not wire.messages:
        raise invalid("messages must hold at least one message.", "messages", "invalid_value")
    chat = _chat(wire, wire.messages)
    offer_of(chat)
    asked_to_think(chat)
    check_messages(chat, max_depth)
    if images := image_references(chat):
        where = images[0].param
        raise invalid(f"{where} is an image, which is not tokenized here.", where, "unsupported_value")


def _chat(wire: TokenizeRequest, messages: list[Message]) -> ChatRequest:
    return ChatRequest(
        model=wire.model or "",
        messages=messages,
        tools=wire.tools,
        chat_template_kwargs=wire.chat_template_kwargs,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=wire.continue_final_message,
    )


def _tokenize(raw: bytes, context: Context) -> Response:
    wire = _read_tokenize(raw, context)
    tokenizer, info = context.engine.tokenizer, context.engine.info
    if wire.prompt is not None:
        tokens = prompt_tokens(wire, wire.prompt, tokenizer, info)
    else:
        assert wire.messages is not None
        tokens = messages_tokens(wire, wire.messages, context)
    return PayloadResponse(
        {
            "count": len(tokens),
            "max_model_len": info.context_length,
            "tokens": tokens,
            "token_strs": tokenizer.token_strings(tokens) if wire.return_token_strs else None,
        }
    )


def prompt_tokens(wire: TokenizeRequest, prompt: str, tokenizer: Tokenizer, info: ModelInfo) -> list[int]:
    """Of a request that `check_tokenize` has passed."""
    check_room(len(prompt), "characters", info, "prompt")
    return tokenizer.encode(prompt, add_special_tokens=wire.add_special_tokens is not False)


def messages_tokens(wire: TokenizeRequest, messages: list[Message], context: Context) -> list[int]:
    """The prompt that a chat of these messages would have. `check_tokenize` has passed the request."""
    engine, depth = context.engine, context.settings.max_json_depth
    check_room(sum(map(characters, messages)), "characters", engine.info, "messages")
    chat = _chat(wire, messages)
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


def _read_detokenize(raw: bytes, context: Context) -> DetokenizeRequest:
    """What takes no model. Raises: APIError with 4xx."""
    wire = parse(raw, DetokenizeRequest, DETOKENIZE, context.settings.max_json_depth)
    check_vocabulary(tuple(wire.tokens), None, "tokens")
    return wire


def _detokenize(raw: bytes, context: Context) -> Response:
    wire = _read_detokenize(raw, context)
    tokenizer, info = context.engine.tokenizer, context.engine.info
    check_room(len(wire.tokens), "tokens", info, "tokens")
    check_vocabulary(tuple(wire.tokens), tokenizer, "tokens")
    return PayloadResponse({"prompt": tokenizer.decode(wire.tokens)})
