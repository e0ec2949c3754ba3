"""`POST /tokenize` and `POST /detokenize`, as they come in. Source: vLLM's documentation, Tokenizer API."""

from __future__ import annotations

from types import MappingProxyType

from chairlift.server.wire.base import Count, Wire
from chairlift.server.wire.chat import Message
from chairlift.server.wire.parameters import Surface
from chairlift.server.wire.tools import Tool


class TokenizeRequest(Wire):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    """Of messages, as in a chat."""
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: list[Count]


TOKENIZE = Surface(
    MappingProxyType(
        {
            "chat_template": (),
            "mm_processor_kwargs": ({},),
        }
    )
)
DETOKENIZE = Surface(MappingProxyType({}))
