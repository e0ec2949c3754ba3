"""What an answer must follow. Sources: OpenAI's API reference, Chat Completions, `response_format`; vLLM's
documentation, "Structured Outputs", and its older names `guided_…`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from chairlift.server.wire.base import OBJECT, TEXT, Wire, by_type, text_or_object

MAX_CHOICES = 1000


class TextFormat(Wire):
    type: Literal["text"]


class JSONObjectFormat(Wire):
    type: Literal["json_object"]


class JSONSchema(Wire):
    name: str
    description: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    """Left out: any JSON."""
    strict: bool | None = None


class JSONSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JSONSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JSONObjectFormat, Tag("<json_object>")]
    | Annotated[JSONSchemaFormat, Tag("<json_schema>")],
    Discriminator(by_type),
]


Schema = Annotated[
    Annotated[str, TEXT] | Annotated[dict[str, object], OBJECT],
    Discriminator(text_or_object),
]
"""A JSON Schema, or its text."""

Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Wire):
    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    """Has no effect: there is nothing to fall back on."""
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class Structured(Wire):
    """Of chats and text completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
