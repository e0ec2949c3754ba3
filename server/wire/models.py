"""`GET /v1/models`, as it goes out. Source: OpenAI's API reference, Models; `max_model_len` is vLLM's.

A client of Anthropic's, known by its `anthropic-version` header, gets the form of that API.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel

from chairlift.engine.embedding.types import EmbeddingModelInfo
from chairlift.engine.plan import ModelInfo


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int
    """Most tokens of prompt and answer together, or of a text that is embedded."""

    input_modalities: list[str]
    """What a prompt may hold: `text`, `image`. The name is OpenRouter's."""

    @classmethod
    def of(cls, info: ModelInfo | EmbeddingModelInfo) -> ModelCard:
        return cls(
            id=info.name,
            created=info.created,
            max_model_len=info.context_length,
            input_modalities=["text", "image"] if isinstance(info, ModelInfo) and info.vision else ["text"],
        )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class AnthropicModelCard(BaseModel):
    """Source: Anthropic's API reference, Models."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    max_input_tokens: int
    """Prompt and answer share the context, so neither can be longer."""
    max_tokens: int
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None

    @classmethod
    def of(cls, info: ModelInfo) -> AnthropicModelCard:
        created = datetime.fromtimestamp(info.created, UTC)
        return cls(
            id=info.name,
            display_name=info.name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=info.context_length,
            max_tokens=info.context_length,
        )


class AnthropicModelList(BaseModel):
    """A page: the list is walked by the ids of its first and last model."""

    data: list[AnthropicModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, cards: Sequence[AnthropicModelCard]) -> AnthropicModelList:
        return cls(
            data=list(cards),
            first_id=cards[0].id if cards else None,
            last_id=cards[-1].id if cards else None,
        )
