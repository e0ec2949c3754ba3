"""Tools as a chat request offers them. Source: OpenAI's API reference, Chat Completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from chairlift.server.wire.base import TEXT, Wire, text_or_type

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")]


class FunctionDefinition(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON Schema of an object; left out, the function takes no arguments."""
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class ToolSubset(Wire):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Wire):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], TEXT]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    Discriminator(text_or_type),
]
