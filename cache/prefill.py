"""Attention of one prefill chunk over its row's keys.

On CUDA, MLX's fused attention builds a cuDNN plan for every new pair of lengths: about 64 ms each on an H200,
paid again and again where prompts and chunks have lengths of their own. So there short chunks are composed of
matrix products (a few ms at a new shape), with scores in float32, and long ones are padded to few shapes.
Elsewhere a new shape costs nothing and the fused call stands as it is.
"""

from __future__ import annotations

import mlx.core as mx

Mask = mx.array | str | None

COMPOSED_BYTES = 64 * 2**20
"""Largest scores that are composed; beyond it the fused call reads less memory."""
QUERY_STEP = 64
KEY_STEP = 1024


def attend_span(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of `[1, heads, tokens, head_dim]` over `[1, kv_heads, held, head_dim]`.

    Args:
        mask: None, "causal" (the last `tokens` keys are the chunk's own) or boolean `[tokens, held]`.
        sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
    """
    if mx.default_device() == mx.gpu and mx.cuda.is_available():
        scores = 4 * queries.shape[1] * queries.shape[2] * keys.shape[2]
        attend = composed if scores <= COMPOSED_BYTES else padded
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def composed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """`attend_span` from matrix products; scores and weights are float32."""
    _, heads, tokens, _ = queries.shape
    _, kv_heads, held, width = values.shape
    group = heads // kv_heads
    grouped = (queries.astype(mx.float32) * scale).reshape(1, kv_heads, group * tokens, -1)
    scores = grouped @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = scores.reshape(1, kv_heads, group, tokens, held)
    allowed = _boolean(mask, tokens, held)
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
) -> mx.array:
    """`attend_span` by the fused call, at lengths rounded up to a few."""
    tokens, held = queries.shape[2], keys.shape[2]
    more_queries, more_keys = -tokens % QUERY_STEP, -held % KEY_STEP
    allowed = _boolean(mask, tokens, held)
    if allowed is None:
        allowed = mx.ones((tokens, held), dtype=mx.bool_)
    # A padded query looks at the first key: a row of the softmax without any would be no number.
    allowed = mx.pad(allowed, [(0, 0), (0, more_keys)])
    first = mx.arange(held + more_keys)[None] == 0
    allowed = mx.concatenate([allowed, mx.broadcast_to(first, (more_queries, held + more_keys))])
    out = mx.fast.scaled_dot_product_attention(
        _longer(queries, more_queries),
        _longer(keys, more_keys),
        _longer(values, more_keys),
        scale=scale,
        mask=allowed,
        sinks=sinks,
    )
    return out[:, :, :tokens]


def _longer(array: mx.array, more: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else array


def _boolean(mask: Mask, tokens: int, held: int) -> mx.array | None:
    if isinstance(mask, str):
        return mx.arange(held)[None] <= mx.arange(held - tokens, held)[:, None]
    return mask
