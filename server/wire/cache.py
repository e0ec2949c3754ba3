"""`POST /v1/cache/warm`, as it comes in."""

from __future__ import annotations

from types import MappingProxyType

from chairlift.server.wire.base import CacheSalt, Wire
from chairlift.server.wire.chat import Message
from chairlift.server.wire.parameters import Surface
from chairlift.server.wire.tools import Tool


class WarmRequest(Wire):
    """Either `prompt` or `messages`: what later prompts begin with."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    cache_salt: CacheSalt | None = None


WARM = Surface(MappingProxyType({}))
