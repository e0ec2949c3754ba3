"""Attention on a CPU without exponentials.

On Linux an exponential costs MLX's CPU backend about 20 ns a number, a mask 6 and a product 0.3; of a prompt
of a thousand tokens the softmax takes longer than all matrix products of a small model. Here scores are made
in units of log 2, and 2^x is its whole part, shifted into the exponent, times a polynomial of the rest:
sixteen plain operations, compiled into two where there is a compiler. They go over one tile after another,
small enough to stay in a core's cache, and keys that a causal tile may not see are not looked at.

Float32 only; the error of a weight is at most 3e-7 of it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

Mask = mx.array | str | None

LEAST_SCORES = 8_192
"""Below it the calls cost more than the exponentials."""
TILE_SCORES = 131_072
"""512 KiB: what a core's own cache holds."""
TILE_QUERIES = 64
"""Fewer rows make slow matrix products."""

_LEAST = -3e38
"""What scores are measured against where no key is in sight: -inf less -inf is no number."""
_LEAST_POWER = -126.0
_ROUNDING = 1.5 * 2.0**23
"""A float32 of this size has no fraction: its last bits are the whole part of what was added."""
_POLYNOMIAL = (1.0, 0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647273)
"""2^x on [-1/2, 1/2], minimax with 2^0 exact: 9e-8, and 1.9e-7 in float32."""


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    known: dict[Any, Any],
) -> mx.array:
    """`cpu_attention` where that is better, else MLX's fused call, which takes the same but for `known`."""
    if cpu_attends(queries, keys, values):
        return cpu_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks, known=known)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def cpu_attends(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether attention of these goes better this way."""
    rows, heads, tokens, _ = queries.shape
    return (
        rows * heads * tokens * keys.shape[2] >= LEAST_SCORES
        and {queries.dtype, keys.dtype, values.dtype} == {mx.float32}
        and mx.default_device() == mx.cpu
    )


def cpu_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    known: dict[Any, Any],
) -> mx.array:
    """Attention of `[rows, heads, tokens, head_dim]` over `[rows, kv_heads, held, head_dim]`, float32.

    Args:
        mask: None, "causal" (the last `tokens` keys are the queries' own) or boolean, `[tokens, held]` or
            `[rows, 1, 1, held]`.
        sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
        known: keeps what is made of masks for the next layer of the same step.
    """
    rows, heads, tokens, _ = queries.shape
    kv_heads, held, width = values.shape[1:]
    group = heads // kv_heads
    grouped = (queries * (scale / math.log(2))).reshape(rows, kv_heads, group, tokens, -1)
    column = None if sinks is None else (sinks / math.log(2)).reshape(1, kv_heads, group, 1, 1)
    by_row, last = list[mx.array](), None
    for row in _slices(rows, heads * tokens * held):
        by_head = list[mx.array]()
        for head in _slices(kv_heads, (row.stop - row.start) * group * tokens * held):
            ours = (row.stop - row.start) * (head.stop - head.start) * group * held
            step = max(TILE_SCORES // ours, -(-TILE_QUERIES // group))
            by_token = list[mx.array]()
            for start in range(0, tokens, step):
                stop = min(start + step, tokens)
                part = grouped[row, head, :, start:stop]
                if last is not None:
                    # In turn: side by side, tiles would push each other out of the cache.
                    (part,) = mx.depends([part], [last])
                shown = held - tokens + stop if mask == "causal" else held
                last = _tile(
                    part,
                    keys[row, head, :shown],
                    values[row, head, :shown],
                    _bias(mask, row, start, stop, shown, known),
                    None if column is None else column[:, head],
                )
                by_token.append(last)
            by_head.append(_joined(by_token, 3))
        by_row.append(_joined(by_head, 1))
    return _joined(by_row, 0).reshape(rows, heads, tokens, width)


def exp2(x: mx.array) -> mx.array:
    """2^x for float32 x of at most 0, any shape; 2^-126 for all below."""
    return _exp2(x, _rounded_and_power, _times_power)


def _exp2(x: mx.array, split: Callable[..., Any], join: Callable[..., Any]) -> mx.array:
    rounded, power = split(x)
    return mx.view(join(mx.view(rounded, mx.int32), mx.view(power, mx.int32)), mx.float32)


def _rounded_and_power(x: mx.array) -> tuple[mx.array, mx.array]:
    """x with its whole part in the last bits, and 2 to the rest."""
    x = mx.maximum(x, _LEAST_POWER)
    rounded = x + _ROUNDING
    rest = x - (rounded - _ROUNDING)
    power = _POLYNOMIAL[-1] * rest + _POLYNOMIAL[-2]
    for coefficient in _POLYNOMIAL[-3::-1]:
        power = power * rest + coefficient
    return rounded, power


def _times_power(whole: mx.array, number: mx.array) -> mx.array:
    """A float's bits times 2^whole."""
    return number + mx.left_shift(whole, 23)


_compiled = mx.compile(_rounded_and_power, shapeless=True), mx.compile(_times_power, shapeless=True)
"""Two passes over the scores in place of sixteen. They take numbers that lie in a row."""


@functools.cache
def compiler_works() -> bool:
    """MLX compiles for a CPU by a C++ compiler, which a machine may not have."""
    x = mx.linspace(-200.0, 0.0, 1001)
    try:
        return bool(mx.array_equal(_exp2(x, *_compiled), exp2(x)).item())
    except RuntimeError as error:
        log.info("attention goes on without compiled exponentials: %s", " ".join(str(error).split())[:200])
        return False


def fast_exp2(x: mx.array) -> mx.array:
    """`exp2` of what was just computed, compiled where that is possible."""
    return _exp2(x, *_compiled) if compiler_works() else exp2(x)


def _tile(
    queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array | None, sinks: mx.array | None
) -> mx.array:
    """`[rows, kv_heads, group, tokens, dim]` over `[rows, kv_heads, keys, dim]`, scores in units of log 2."""
    rows, kv_heads, group, tokens, dim = queries.shape
    shown = keys.shape[2]
    scores = queries.reshape(rows, kv_heads, group * tokens, dim) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(rows, kv_heads, group, tokens, shown)
    if bias is not None:
        scores = scores + bias
    most = mx.maximum(scores.max(axis=-1, keepdims=True), _LEAST)
    if sinks is not None:
        most = mx.maximum(most, sinks)
    weights = fast_exp2(scores - most).reshape(rows, kv_heads, group * tokens, shown)
    # A product sums faster than a reduction.
    total = (weights @ mx.ones((shown, 1))).reshape(most.shape)
    if sinks is not None:
        total = total + exp2(sinks - most)
    return (weights @ values).reshape(rows, kv_heads, group, tokens, -1) / total


def _bias(
    mask: Mask, row: slice, start: int, stop: int, shown: int, known: dict[Any, Any]
) -> mx.array | None:
    """What to add to the scores of queries `[start, stop)`, in a form that goes with them."""
    if mask is None or (mask == "causal" and stop - start == 1):
        return None
    if isinstance(mask, str):
        key: tuple[Any, ...] = ("bias", stop - start, shown)
        if key not in known:
            last = mx.arange(shown - (stop - start), shown)[:, None]
            known[key] = mask, mx.where(mx.arange(shown)[None] <= last, 0.0, -mx.inf)
    else:
        # Ends too: a layer of other heads has other tiles.
        key = ("bias", id(mask), row.start, row.stop, start, stop)
        if key not in known:
            allowed = mask[start:stop] if mask.ndim == 2 else mask[row, :, :, None]
            known[key] = mask, mx.where(allowed, 0.0, -mx.inf)
    bias: mx.array = known[key][1]  # beside the mask, whose id is its name while it lives
    return bias


def _slices(count: int, scores: int) -> Iterator[slice]:
    """`count` things of `scores` each, in parts of at most `count` tiles: smaller ones were no faster."""
    step = max(1, count * TILE_SCORES // scores)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
