"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, as they come in.

Source: Anthropic's API reference, Messages, and the types of its Python SDK. `cache_control` has no effect:
prompts are kept for reuse unasked.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from chairlift.server.wire.base import LIST, OBJECT, TEXT, Count, Wire, by_type, text_or_list, text_or_object

Hint = dict[str, object]
"""Of `cache_control`."""


class Citations(Wire):
    enabled: Literal[False] | None = None
    """Answers cite nothing."""


class TextBlock(Wire):
    type: Literal["text"]
    text: str
    cache_control: Hint | None = None
    citations: list[dict[str, object]] | None = None
    """Of an answer sent back as history; has no effect."""


class Base64Source(Wire):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class URLSource(Wire):
    type: Literal["url"]
    url: str


class Transformations(Wire):
    oversized_image: Literal["downsize"] | None = None


class ImageBlock(Wire):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[URLSource, Tag("<url>")], Discriminator(by_type)
    ]
    cache_control: Hint | None = None
    transformations: Transformations | None = None


class PlainTextSource(Wire):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


TextOrImage = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")], Discriminator(by_type)
]


class ContentSource(Wire):
    type: Literal["content"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[TextOrImage], LIST], Discriminator(text_or_list)]


class DocumentBlock(Wire):
    """Of text; PDF and files are refused by the name of their source."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainTextSource, Tag("<text>")] | Annotated[ContentSource, Tag("<content>")],
        Discriminator(by_type),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: Hint | None = None


class SearchResultBlock(Wire):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None
    cache_control: Hint | None = None


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Wire):
    type: Literal["redacted_thinking"]
    data: str
    """For its maker's eyes only, so it is left out of the prompt."""


class DirectCaller(Wire):
    type: Literal["direct"]


class ToolUseBlock(Wire):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]
    caller: DirectCaller | None = None
    toolset_name: None = None
    cache_control: Hint | None = None


class ToolReferenceBlock(Wire):
    """A tool that a search of the client found. All tools are in the prompt, so the name says it all."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Hint | None = None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    Discriminator(by_type),
]


class ToolResultBlock(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[Annotated[str, TEXT] | Annotated[list[ResultBlock], LIST], Discriminator(text_or_list)]
        | None
    ) = None
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: Hint | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(by_type),
]


class Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Block], LIST], Discriminator(text_or_list)]


class CustomTool(Wire):
    name: str
    description: str | None = None
    input_schema: dict[str, object]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, object]] | None = None
    cache_control: Hint | None = None
    eager_input_streaming: bool | None = None
    """Has no effect: arguments are streamed as they are made."""
    defer_loading: bool | None = None
    """Has no effect: every tool is in the prompt from the start."""
    allowed_callers: list[Literal["direct"]] | None = None


class TypedTool(Wire):
    """One that Anthropic defines, by its `type`."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


def _custom_or_typed(tool: object) -> str:
    name = tool.get("type") if isinstance(tool, dict) else None
    return "<typed>" if isinstance(name, str) and name != "custom" else "<custom>"


Tool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[TypedTool, Tag("<typed>")],
    Discriminator(_custom_or_typed),
]


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(Wire):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: None = None


class KeepThinking(Wire):
    type: Literal["thinking_turns", "all"]
    value: Annotated[Count, Field(ge=1)] | None = None


class ClearThinking(Wire):
    type: Literal["clear_thinking_20251015"]
    keep: (
        Annotated[
            Annotated[Literal["all"], TEXT] | Annotated[KeepThinking, OBJECT],
            Discriminator(text_or_object),
        ]
        | None
    ) = None


class InputTokens(Wire):
    type: Literal["input_tokens"]
    value: Annotated[Count, Field(ge=0)]


class ToolUses(Wire):
    type: Literal["tool_uses"]
    value: Annotated[Count, Field(ge=0)]


class ClearToolUses(Wire):
    """The defaults are Anthropic's."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[
        Annotated[InputTokens, Tag("<input_tokens>")] | Annotated[ToolUses, Tag("<tool_uses>")],
        Discriminator(by_type),
    ] = InputTokens(type="input_tokens", value=100_000)
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: Annotated[
        Annotated[bool | None, Tag("<boolean>")] | Annotated[list[str], Tag("<texts>")],
        Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<boolean>"),
    ] = None


Edit = Annotated[
    Annotated[ClearThinking, Tag("<clear_thinking_20251015>")]
    | Annotated[ClearToolUses, Tag("<clear_tool_uses_20250919>")],
    Discriminator(by_type),
]


class ContextManagement(Wire):
    edits: list[Edit] | None = None


class Metadata(Wire):
    user_id: str | None = None


class CountTokensRequest(Wire):
    """What makes up the prompt."""

    model: str
    messages: list[Message]
    system: (
        Annotated[Annotated[str, TEXT] | Annotated[list[TextBlock], LIST], Discriminator(text_or_list)] | None
    ) = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: Hint | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Count
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
