"""One row's own cache while a chunk of its prompt passes alone, on CUDA.

MLX's fused attention there plans anew for every pair of lengths, tens of milliseconds each, and prompts and
chunks have lengths of their own. So a full-attention cache is wrapped: the model stores its keys in it as
ever, and attention is that of a flat step with this one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from chairlift.cache.attention import CohortKV
from chairlift.cache.views import AttendView, SeamMask, SpanStep


def prompt_views(caches: Sequence[Any]) -> list[Any]:
    """The caches to call a model with for a chunk of one row."""
    known: dict[Any, Any] = {}
    return [PromptView(cache, known) if type(cache).__name__ == "KVCache" else cache for cache in caches]


class PromptView:
    """A full-attention cache of one row, as the model's cache.

    Args:
        cache: the row's own.
        known: what is the same for all layers of the call.
    """

    def __init__(self, cache: Any, known: dict[Any, Any]) -> None:
        self._cache = cache
        self._known = known
        self._view: AttendView

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> SeamMask:
        return SeamMask(window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PromptView, PromptView]:
        """Store `[1, kv_heads, tokens, head_dim]`."""
        span = SpanStep(0, keys.shape[2], self.offset, self._known)
        self._view = AttendView(CohortKV(), None, mx.array(self.offset), [(span, self._cache)])
        self._view.update_and_fetch(_flat(keys), _flat(values))
        return self, self

    def attend(
        self, queries: mx.array, *, scale: float, mask: SeamMask | None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of `[1, heads, tokens, head_dim]` over what the row holds; same shape.

        Raises:
            TypeError: a mask that the model changed or made itself.
        """
        out = self._view.attend(_flat(queries), scale=scale, mask=mask, sinks=sinks)
        return out[:, :, 0].swapaxes(0, 1)[None]


def _flat(array: mx.array) -> mx.array:
    """A row `[1, heads, tokens, dim]` as a flat step `[tokens, heads, 1, dim]`."""
    return array[0].swapaxes(0, 1)[:, :, None]
