"""Attention of one prefill chunk over its row's keys.

On CUDA, MLX's fused attention builds a cuDNN plan for every new pair of lengths: about 64 ms each on an H200,
paid again and again where prompts and chunks have lengths of their own. So there short chunks are composed of
matrix products (a few ms at a new shape), with scores in float32, and long ones are padded to few shapes.
On a CPU the softmax is made anew (`chairlift.cache.cpu_attention`). Elsewhere the fused call stands as it is.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.cache.cpu_attention import Mask, attention
from chairlift.cache.device import on_cuda

COMPOSED_BYTES = 16 * 2**20
"""Largest scores that are composed; beyond it the fused call reads less memory."""
QUERY_STEP = 64
KEY_STEP = 256
"""Tokens; the step in which mlx-lm's caches grow, so that their own arrays serve as padded keys."""


def attend_span(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    known: dict[Any, Any] | None = None,
    buffers: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Attention of `[1, heads, tokens, head_dim]` over `[1, kv_heads, held, head_dim]`.

    Args:
        mask: None, "causal" (the last `tokens` keys are the chunk's own) or boolean `[tokens, held]`.
        sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
        known: keeps the masks made here for the next layer of the same step.
        buffers: arrays that begin with `keys` and `values` and go on with room that nobody uses.
    """
    known = {} if known is None else known
    if on_cuda():
        scores = 4 * queries.shape[1] * queries.shape[2] * keys.shape[2]
        if scores <= COMPOSED_BYTES:
            return composed(queries, keys, values, scale=scale, mask=mask, sinks=sinks, known=known)
        return padded(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, known=known, buffers=buffers
        )
    return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks, known=known)


def composed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    known: dict[Any, Any] | None = None,
) -> mx.array:
    """`attend_span` from matrix products; scores and weights are float32."""
    _, heads, tokens, _ = queries.shape
    _, kv_heads, held, width = values.shape
    group = heads // kv_heads
    grouped = (queries.astype(mx.float32) * scale).reshape(1, kv_heads, group * tokens, -1)
    scores = grouped @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = scores.reshape(1, kv_heads, group, tokens, held)
    allowed = _boolean(mask, tokens, held, known)
    if allowed is not None:
        scores = mx.where(allowed, scores, -mx.inf)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(1, kv_heads, group, 1, 1)
        column = mx.broadcast_to(column, (1, kv_heads, group, tokens, 1))
        weights = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :held]
    else:
        weights = mx.softmax(scores, axis=-1)
    out = weights.reshape(1, kv_heads, group * tokens, held) @ values.astype(mx.float32)
    return out.reshape(1, heads, tokens, width).astype(queries.dtype)


def padded(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    known: dict[Any, Any] | None = None,
    buffers: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """`attend_span` by the fused call, at lengths rounded up to a few."""
    tokens, held = queries.shape[2], keys.shape[2]
    more_queries, more_keys = -tokens % QUERY_STEP, -held % KEY_STEP
    if buffers is not None and buffers[0].shape[2] == held + more_keys:
        keys, values = buffers
    else:
        # Whole arrays, for a view of one with more room is a new shape, too.
        keys, values = (mx.contiguous(_longer(array, more_keys)) for array in (keys, values))
    out = mx.fast.scaled_dot_product_attention(
        _longer(queries, more_queries),
        keys,
        values,
        scale=scale,
        mask=_padded_mask(mask, tokens, held, more_queries, more_keys, known),
        sinks=sinks,
    )
    return out[:, :, :tokens]


def _padded_mask(
    mask: Mask, tokens: int, held: int, more_queries: int, more_keys: int, known: dict[Any, Any] | None
) -> mx.array:
    known = {} if known is None else known
    key = ("padded", held, id(mask))
    if key not in known:
        allowed = _boolean(mask, tokens, held, known)
        if allowed is None:
            allowed = mx.ones((tokens, held), dtype=mx.bool_)
        # A padded query looks at the first key: a row of the softmax without any would be no number.
        allowed = mx.pad(allowed, [(0, 0), (0, more_keys)])
        first = mx.arange(held + more_keys)[None] == 0
        extra = mx.broadcast_to(first, (more_queries, held + more_keys))
        known[key] = mask, mx.concatenate([allowed, extra])
    padded_mask: mx.array = known[key][1]
    return padded_mask


def _longer(array: mx.array, more: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else array


def _boolean(mask: Mask, tokens: int, held: int, known: dict[Any, Any] | None) -> mx.array | None:
    if not isinstance(mask, str):
        return mask
    known = {} if known is None else known
    key = ("causal", tokens, held)
    if key not in known:
        known[key] = mx.arange(held)[None] <= mx.arange(held - tokens, held)[:, None]
    causal: mx.array = known[key]
    return causal
