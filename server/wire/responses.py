"""`POST /v1/responses`, as it comes in. Source: OpenAI's API reference, Responses.

Items are read in the form in which they go out, too: an answer's items may be sent back as they are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from chairlift.server.wire.base import LIST, TEXT, Count, Generated, Wire, by_type, text_or_list, text_or_type
from chairlift.server.wire.structured import StructuredOutputs

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Kinds of tools that OpenAI's service runs, or for which its models are trained. Clients send them
unasked; they are left out of the prompt."""

Status = Literal["in_progress", "completed", "incomplete"]
Extra = dict[str, object]


class InputText(Wire):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Extra | None = None
    """Has no effect: prefixes are cached without being told."""


class OutputText(Wire):
    type: Literal["output_text"]
    text: str
    annotations: list[Extra] | None = None
    logprobs: list[Extra] | None = None


class Refusal(Wire):
    type: Literal["refusal"]
    refusal: str


class InputImage(Wire):
    type: Literal["input_image"]
    image_url: str
    """`data:`, `http:` or `https:`; a `file:` URL or a path where the operator allows it."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None
    prompt_cache_breakpoint: Extra | None = None


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")]
    | Annotated[InputImage, Tag("<input_image>")],
    Discriminator(by_type),
]


Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[Part], LIST],
    Discriminator(text_or_list),
]


class MessageItem(Wire):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Has no effect."""


class FunctionCallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON, as some model once wrote it: not always valid."""
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: Extra | None = None
    created_by: str | None = None
    asynchronous: bool | None = Field(default=None, alias="async")


class FunctionCallOutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Extra | None = None
    created_by: str | None = None


class CustomToolCallItem(Wire):
    """Of another server's answer: custom tools are not called here. Its input is text, not JSON."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: Status | None = None
    namespace: str | None = None
    caller: Extra | None = None
    created_by: str | None = None


class CustomToolCallOutputItem(Wire):
    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None
    caller: Extra | None = None
    created_by: str | None = None


class SummaryText(Wire):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Wire):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Wire):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ItemReference(Wire):
    """An item of a stored response, its input or output."""

    type: Literal["item_reference"] | None = None
    id: str


def _item(value: object) -> str | None:
    if isinstance(value, dict) and value.get("type") is None:
        refers = "id" in value and "role" not in value and "content" not in value
        return "<item_reference>" if refers else "<message>"
    return by_type(value)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomToolCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_item),
]

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])

Input = Annotated[
    Annotated[str, TEXT] | Annotated[list[Item], LIST],
    Discriminator(text_or_list),
]


class FunctionTool(Wire):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Extra | None = None
    strict: bool | None = None
    output_schema: Extra | None = None
    """Has no effect."""
    defer_loading: bool | None = None
    """Has no effect: every function is in the prompt."""
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    asynchronous: bool | None = Field(default=None, alias="async")


class HostedTool(Wire):
    """Left out of the prompt, whatever it holds."""

    model_config = ConfigDict(extra="allow")
    type: str


def _tool(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<hosted>" if isinstance(kind, str) and kind in HOSTED_TOOLS else by_type(value)


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool),
]


class NamedFunction(Wire):
    type: Literal["function"]
    name: str


class AllowedTools(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Extra]
    """Each with `type`; functions with `name`."""


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], TEXT]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    Discriminator(text_or_type),
]


class Reasoning(Wire):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(Wire):
    type: Literal["text"]


class JSONObjectFormat(Wire):
    type: Literal["json_object"]


class JSONSchemaFormat(Wire):
    type: Literal["json_schema"]
    name: str
    schema_: Extra = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JSONObjectFormat, Tag("<json_object>")]
    | Annotated[JSONSchemaFormat, Tag("<json_schema>")],
    Discriminator(by_type),
]


class TextConfig(Wire):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(Wire):
    include_obfuscation: bool | None = None
    """Has no effect: nothing is obfuscated."""


Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""All but `message.output_text.logprobs` and `reasoning.encrypted_content` ask for nothing that is not there
anyway: the others' items never occur, and images are in the items listed."""


class ResponsesRequest(Generated):
    input: Input | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[Count, Field(ge=1)] | None = None
    """Counts calls of hosted tools, of which there are none."""
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_logprobs: Count | None = None
    truncation: Literal["auto", "disabled"] | None = None
    client_metadata: dict[str, object] | None = None
    """Codex's; has no effect."""
    chat_template_kwargs: dict[str, object] | None = None
    enable_thinking: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Count | None = None
