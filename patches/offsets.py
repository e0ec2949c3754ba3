"""Positions made from one integer are made from each row's own.

Upstream, mlx-lm 0.32, where `cache.offset` is an array of the rows' offsets:

- gpt_bigcode feeds it to `numpy.arange`;
- the rope of type "dynamic" (internlm3 and any model whose configuration asks for it) compares it with the
  trained length, and would need a base per row beyond it;
- afm7's layers that reuse keys place their queries by the number of keys, that of the longest row.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.2,<0.33"


def _gpt_bigcode(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, inputs: mx.array, cache: Any = None) -> Any:
        offset = cache[0].offset if cache is not None and cache[0] is not None else 0
        if not isinstance(offset, mx.array):
            return original(self, inputs, cache)
        from mlx_lm.models.base import create_attention_mask

        hidden = self.wte(inputs)
        mask = create_attention_mask(hidden, cache[0])
        hidden = hidden + self.wpe(offset[:, None] + mx.arange(inputs.shape[1]))
        for layer, layer_cache in zip(self.h, cache, strict=True):
            hidden = layer(hidden, mask, cache=layer_cache)
        return self.ln_f(hidden)

    return call


def _dynamic_rope(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, x: mx.array, offset: int | mx.array = 0) -> Any:
        """x `[rows, heads, tokens, head_dim]`; offset an integer or int32 `[rows]`."""
        if not isinstance(offset, mx.array):
            return original(self, x, offset)
        trained = self.max_position_embeddings
        length = mx.maximum(x.shape[-2] + offset.reshape(-1), trained).astype(mx.float32)
        stretch = self.factor * length / trained - (self.factor - 1)
        base = self.base * stretch ** (self.dims / (self.dims - 2))
        positions = (offset.reshape(-1, 1) + mx.arange(x.shape[-2])).astype(mx.float32)
        return _rotate(x, positions, base, self.dims, self.traditional)

    return call


def _rotate(x: mx.array, positions: mx.array, base: mx.array, dims: int, traditional: bool) -> mx.array:
    """Rotary positions `[rows, tokens]` with a base for each row `[rows]`: as `mx.fast.rope` computes them
    for one base."""
    exponents = mx.arange(0, dims, 2, dtype=mx.float32) / dims
    speeds = base[:, None] ** -exponents
    angles = (positions[..., None] * speeds[:, None])[:, None]
    cosine, sine = mx.cos(angles), mx.sin(angles)
    turned = x[..., :dims].astype(mx.float32)
    if traditional:
        first, second = turned[..., ::2], turned[..., 1::2]
        pair = [first * cosine - second * sine, first * sine + second * cosine]
        out = mx.stack(pair, axis=-1).reshape(turned.shape)
    else:
        first, second = mx.split(turned, 2, axis=-1)
        out = mx.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
    return mx.concatenate([out.astype(x.dtype), x[..., dims:]], axis=-1)


def _afm7_reuse(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, x: mx.array, keys: Any, values: Any, mask: Any = None) -> Any:
        if not hasattr(keys, "attend"):
            return original(self, x, keys, values, mask)
        rows, tokens, _ = x.shape
        queries = self.q_proj(x).reshape(rows, tokens, self.n_heads, -1).transpose(0, 2, 1, 3)
        queries = self.q_norm(self.rope(queries, offset=keys.offset))
        output = keys.attend(queries, scale=self.scale, mask=mask)
        return self.out_proj(output.transpose(0, 2, 1, 3).reshape(rows, tokens, -1))

    return call


OFFSETS = (
    Replacement("mlx_lm.models.gpt_bigcode", "GPTBigCodeModel", "__call__", _gpt_bigcode),
    Replacement("mlx_lm.models.rope_utils", "DynamicNTKScalingRoPE", "__call__", _dynamic_rope),
    Replacement("mlx_lm.models.afm7", "KVReuseAttention", "__call__", _afm7_reuse),
)
