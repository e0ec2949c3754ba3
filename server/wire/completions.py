"""`POST /v1/completions`, as it comes in. Source: OpenAI's API reference, Completions (legacy)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator

from chairlift.server.wire.base import TEXT, TEXTS, TOKEN_LISTS, TOKENS, Count, Sampled
from chairlift.server.wire.structured import Structured


def _form(value: object) -> str:
    if not isinstance(value, list):
        return "<text>"
    if value and isinstance(value[0], str):
        return "<texts>"
    return "<token lists>" if value and isinstance(value[0], list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, TEXT]
    | Annotated[list[str], TEXTS]
    | Annotated[list[Count], TOKENS]
    | Annotated[list[list[Count]], TOKEN_LISTS],
    Discriminator(_form),
]


class CompletionRequest(Sampled, Structured):
    prompt: Prompt
    echo: bool | None = None
    best_of: Count | None = None
    logprobs: Count | None = None
