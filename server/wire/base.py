"""What every wire model shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

TAG = "<"
"""Union tags start with this, so that they can be told from field names in an error's location."""

TEXT = Tag("<text>")
LIST = Tag("<list>")
OBJECT = Tag("<object>")
TEXTS = Tag("<texts>")
TOKENS = Tag("<tokens>")
TOKEN_LISTS = Tag("<token lists>")

Count = Annotated[int, Field(le=2**31 - 1)]
"""Sizes and token ids, within what an array of 32-bit integers holds."""


CacheSalt = Annotated[str, Field(min_length=1, max_length=512)]
"""Whose kept prefixes are: the same wherever one is sent."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""Within OpenAI's bounds."""


class Wire(BaseModel):
    """Strict: no string passes for a number, no unknown field passes, NaN and infinities do not pass."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def by_type(value: object) -> str | None:
    """The union tag of an object, after its `type`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


def text_or_type(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else by_type(value)


def text_or_list(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def text_or_object(value: object) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


Texts = Annotated[Annotated[str, TEXT] | Annotated[list[str], LIST], Discriminator(text_or_list)]


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Has no effect: nothing is obfuscated."""
    continuous_usage_stats: bool | None = None
    """vLLM's; only false is served."""


class Drawn(Wire):
    """How tokens are drawn, under names that all of OpenAI's surfaces share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Count] | None = None
    min_tokens: Count | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    stop: Texts | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None


class Generated(Drawn):
    """What all of OpenAI's surfaces that generate have in common, but for how they answer."""

    model: str
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """vLLM's: smaller is sooner; 0 by default."""
    cache_salt: CacheSalt | None = None
    """vLLM's: kept prefixes are shared only among requests of the same salt."""


class Sampled(Generated):
    """What chat and text completions have in common."""

    max_tokens: Count | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
