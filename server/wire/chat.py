"""`POST /v1/chat/completions`, as it comes in. Source: OpenAI's API reference, Chat Completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from chairlift.server.wire.base import (
    LIST,
    OBJECT,
    TEXT,
    Count,
    Sampled,
    Wire,
    by_type,
    text_or_list,
    text_or_object,
)
from chairlift.server.wire.structured import Structured
from chairlift.server.wire.tools import Tool, ToolChoice


class TextPart(Wire):
    type: Literal["text", "input_text", "output_text"]
    """The latter two are the names of the Responses API."""
    text: str
    annotations: list[dict[str, object]] | None = None
    """Of an answer sent back as history; has no effect."""
    logprobs: list[dict[str, object]] | None = None
    """The same."""
    cache_control: dict[str, object] | None = None
    """A hint that has no effect, as has the next one: what can be reused is found without it."""
    prompt_cache_breakpoint: dict[str, object] | None = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class ImageURL(Wire):
    url: str
    """`data:`, `http:` or `https:`; a `file:` URL or a path where the operator allows it."""
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: Annotated[Annotated[str, TEXT] | Annotated[ImageURL, OBJECT], Discriminator(text_or_object)]
    """A bare string is the URL, as some clients send it."""
    cache_control: dict[str, object] | None = None
    prompt_cache_breakpoint: dict[str, object] | None = None


class ThinkingPart(Wire):
    """An assistant's thoughts among its content, as Anthropic's clients send them back."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Has no effect."""


def _kind(part: object) -> str | None:
    tag = by_type(part)
    return "<text>" if tag in ("<input_text>", "<output_text>") else tag


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[ThinkingPart, Tag("<thinking>")],
    Discriminator(_kind),
]


Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[Part], LIST],
    Discriminator(text_or_list),
]


class FunctionCall(Wire):
    name: str
    arguments: str
    """JSON, as some model once wrote it: not always valid."""


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Left over by clients that put a streamed call together."""


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for `reasoning_content`."""
    annotations: list[dict[str, object]] | None = None
    """Of an answer sent back as history; has no effect."""
    audio: None = None
    """Null in an answer sent back as history."""


class ChatRequest(Sampled, Structured):
    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[Count, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
