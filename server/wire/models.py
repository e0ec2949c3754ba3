"""`GET /v1/models`, as it goes out. Source: OpenAI's API reference, Models; `max_model_len` is vLLM's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from chairlift.engine.plan import ModelInfo


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int
    """Most tokens of prompt and answer together."""

    input_modalities: list[str]
    """What a prompt may hold: `text`, `image`. The name is OpenRouter's."""

    @classmethod
    def of(cls, info: ModelInfo) -> ModelCard:
        return cls(
            id=info.name,
            created=info.created,
            max_model_len=info.context_length,
            input_modalities=["text", "image"] if info.vision else ["text"],
        )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
