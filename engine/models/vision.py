"""mlx-vlm's models, called as mlx-lm's are, with what rows with images need beside.

Multimodal positions are always told (`position_ids`, `[3, rows, tokens]`): from each row's own count of
tokens and its own delta. So what these models keep on themselves of their last call (`_rope_deltas`,
`_position_ids`) is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class SeeingModel(nn.Module):  # type: ignore[misc]
    """A model of mlx-vlm: `model(tokens, cache=caches)` -> logits `[rows, tokens, vocab]`.

    Args:
        inner: as mlx-vlm loads it.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._multimodal = has_multimodal_positions(inner.language_model)

    def make_cache(self) -> list[Any]:
        """Fresh caches of the language model, one a layer."""
        from mlx_vlm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.inner.language_model)
        return caches

    def __call__(self, tokens: mx.array, cache: list[Any], **told: Any) -> mx.array:
        """
        Args:
            tokens: int32 `[rows, tokens]`.
            cache: one a layer.
            told: `deltas`, int32 `[rows]`, of rows with images; for a span of one row with images what
                `chairlift.engine.models.images` says of it.
        """
        told = self._placed(tokens, cache, told)
        logits: mx.array = self.inner.language_model(tokens, cache=cache, **told).logits
        return logits

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Which parameters may be cast to half precision, by name: the inner model's own word."""
        inner = getattr(self.inner, "cast_predicate", None)
        return lambda name: inner is None or bool(inner(name.removeprefix("inner.")))

    @property
    def model(self) -> Body:
        """The language model without its head (`chairlift.engine.models.batching.split_head`)."""
        return Body(self)

    @property
    def lm_head(self) -> Any:
        return getattr(self.inner.language_model, "lm_head", None)

    def _placed(self, tokens: mx.array, cache: list[Any], told: dict[str, Any]) -> dict[str, Any]:
        deltas = told.pop("deltas", None)
        if self._multimodal and "position_ids" not in told:
            told["position_ids"] = step_positions(tokens, cache, deltas)
        return told


class Body:
    """(tokens, cache=caches) -> hidden states, as mlx-lm's models have it below `model`."""

    def __init__(self, whole: SeeingModel) -> None:
        self._whole = whole
        self._body = whole.inner.language_model.model
        self.embed_tokens = getattr(self._body, "embed_tokens", None)

    def __call__(self, tokens: mx.array, cache: list[Any], **told: Any) -> mx.array:
        hidden: mx.array = self._body(tokens, cache=cache, **self._whole._placed(tokens, cache, told))
        return hidden


def has_multimodal_positions(language_model: Any) -> bool:
    """Whether a language model takes positions in three dimensions."""
    return hasattr(language_model, "get_rope_index") or hasattr(language_model, "_rope_deltas")


def step_positions(tokens: mx.array, cache: list[Any], deltas: mx.array | None = None) -> mx.array:
    """Positions `[3, rows, tokens]` of text behind what the caches hold.

    Args:
        tokens: `[rows, tokens]`.
        cache: of which the first with a count of tokens (`offset`, a number or int32 `[rows]`) tells it.
        deltas: int32 `[rows]`, added to a row's count; None for all 0.
    """
    rows, length = tokens.shape
    offset = next((part.offset for part in _flat(cache) if hasattr(part, "offset")), 0)
    first = mx.array(offset, dtype=mx.int32).reshape(-1)
    if deltas is not None:
        first = first + deltas
    positions = first[:, None] + mx.arange(length, dtype=mx.int32)
    return mx.broadcast_to(positions, (3, rows, length))


def _flat(caches: list[Any]) -> list[Any]:
    return [leaf for cache in caches for leaf in getattr(cache, "caches", None) or [cache]]
