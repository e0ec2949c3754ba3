"""What goes out on `/v1/responses` and `/v1/messages`, for the description of the API (see `answers`).

Sources: OpenAI's API reference, Responses; Anthropic's, Messages.
"""

from __future__ import annotations

from typing import Any, Literal

from chairlift.server.openapi.answers import Out

Open = dict[str, Any]
"""An object whose fields differ."""


class ResponsePart(Out):
    type: Literal["output_text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Open] | None = None
    logprobs: list[Open] | None = None


class OutputItem(Out):
    """A message, a call of a function, or reasoning."""

    id: str
    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None


class ResponseError(Out):
    code: str
    message: str


class IncompleteDetails(Out):
    reason: str


class InputDetails(Out):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Out):
    reasoning_tokens: int


class ResponseUsage(Out):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(Out):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled", "queued"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | list[Open] | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Open
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Open
    tool_choice: str | Open
    tools: list[Open]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class InputTokenCount(Out):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(Out):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Out):
    object: Literal["list"]
    data: list[Open]
    first_id: str | None
    last_id: str | None
    has_more: bool


# -- Anthropic


class ThinkingDetails(Out):
    thinking_tokens: int


class MessageUsage(Out):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails


class ContentBlock(Out):
    """A text, a thought or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Open | None = None


class AppliedEdits(Out):
    applied_edits: list[Open]


class AnthropicMessage(Out):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None
    stop_sequence: str | None
    stop_details: Open | None
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class OriginalTokens(Out):
    original_input_tokens: int


class TokenCount(Out):
    input_tokens: int
    context_management: OriginalTokens | None = None
