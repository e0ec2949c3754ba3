"""Llama 4's chunked attention, row by row in a batch.

Upstream, mlx-lm 0.32: the model makes one mask for all rows from the first cache's position, and its
`ChunkedKVCache` has no batch form. Under views that offer `by_parts`, each row's mask comes from its own
cache; the attention (its temperature too) takes one row at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.patches.parts import calling_by_parts
from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.2,<0.33"


class ChunkMask:
    """The mask of the chunked layers. `chunk`: tokens."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def for_part(self, cache: Any, tokens: int) -> mx.array:
        """Boolean `[tokens, kept]`, as upstream makes it; trims the cache first."""
        cache.maybe_trim_front()
        end = cache.offset + tokens
        keys = mx.arange(cache.start_position, end)
        queries = mx.arange(cache.offset, end)[:, None]
        return (keys // self.chunk == queries // self.chunk) & (keys <= queries)


def _model(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, inputs: mx.array, cache: Any = None) -> Any:
        if cache is None or not hasattr(cache[0], "by_parts"):
            return original(self, inputs, cache)
        hidden = self.embed_tokens(inputs)
        chunked = ChunkMask(self.attention_chunk_size)
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            whole = (index + 1) % 4 == 0
            hidden = layer(hidden, layer_cache.make_mask(1) if whole else chunked, cache=layer_cache)
        return self.norm(hidden)

    return call


CHUNKED = (
    Replacement("mlx_lm.models.llama4", "LlamaModel", "__call__", _model),
    Replacement(
        "mlx_lm.models.llama4", "Attention", "__call__", functools.partial(calling_by_parts, alone=True)
    ),
)
