"""`GET /v1/models`, as it goes out. Source: OpenAI's API reference, Models; `max_model_len` is vLLM's.

A client of Anthropic's, known by its `anthropic-version` header, gets the form of that API.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel

from chairlift.engine.plan import ModelInfo
from chairlift.server.models.model import Model
from chairlift.server.models.roster import State
from chairlift.server.wire.base import Wire
from chairlift.server.wire.parameters import Surface


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int | None
    """Most tokens of prompt and answer together, or of a text that is embedded. Null: not known before the
    model's files are here."""

    input_modalities: list[str] | None
    """What a prompt may hold: `text`, `image`. The name is OpenRouter's. Null: not known before the model was
    loaded."""
    aliases: list[str]
    """Other names that requests may give."""
    state: Literal["loaded", "loading", "unloading", "unloaded", "failed"]
    reason: str | None = None
    """Why it has failed."""

    @classmethod
    def of(cls, model: Model) -> ModelCard:
        info, spec = model.info, model.spec
        modalities = None
        if info is not None:
            modalities = ["text", "image"] if isinstance(info, ModelInfo) and info.vision else ["text"]
        failed = model.state is State.FAILED
        return cls(
            id=model.name,
            created=info.created if info is not None else spec.created,
            max_model_len=info.context_length if info is not None else spec.context_length,
            input_modalities=modalities,
            aliases=list(spec.aliases),
            state=model.state.value,  # type: ignore[arg-type]
            reason=model.entry.reason if failed else None,
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
    max_input_tokens: int | None
    """Prompt and answer share the context, so neither can be longer. Null: not known yet."""
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None

    @classmethod
    def of(cls, model: Model) -> AnthropicModelCard:
        info = model.info
        created = datetime.fromtimestamp(info.created if info is not None else model.spec.created, UTC)
        context = info.context_length if info is not None else model.spec.context_length
        return cls(
            id=model.name,
            display_name=model.name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=context,
            max_tokens=context,
        )


class AnthropicModelList(BaseModel):
    """A page: the list is walked by the ids of its first and last model."""

    data: list[AnthropicModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, cards: Sequence[AnthropicModelCard], *, has_more: bool = False) -> AnthropicModelList:
        return cls(
            data=list(cards),
            has_more=has_more,
            first_id=cards[0].id if cards else None,
            last_id=cards[-1].id if cards else None,
        )


class LoadRequest(Wire):
    """`POST /v1/models/load`, as it comes in."""

    model: str


class UnloadRequest(LoadRequest):
    force: bool | None = None
    """End running answers."""


OPERATE = Surface(MappingProxyType({}))
