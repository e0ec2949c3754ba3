"""Which tokens a row may draw: temperature, then top_k, top_p, min_p, xtc.

The order of the first is that of vLLM and mlx-lm. xtc ("exclude top choices") as mlx-lm has it, but on the
probabilities that the token is drawn from: with temperature, behind the other filters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.rows import replaced, taken

_COLDEST = 1e-7
"""Temperatures below count as this, under which logits that differ at all are drawn greedily: smaller ones
take logits out of float32."""


def filtered(logits: mx.array, settings: Sequence[SamplingParams]) -> mx.array:
    """Logits over temperature, -inf where a filter drops the token. Rows without a filter pass unchanged."""
    heat = [max(params.temperature or 1.0, _COLDEST) for params in settings]
    if any(value != 1.0 for value in heat):
        logits = logits / mx.array(heat, dtype=mx.float32)[:, None]
    vocab = logits.shape[-1]
    logits = _on(logits, settings, lambda params: 0 < params.top_k < vocab, _top_k)
    logits = _on(logits, settings, lambda params: params.top_p < 1, _top_p)
    return _on(logits, settings, lambda params: params.min_p > 0, _min_p)


Filter = Callable[[mx.array, list[SamplingParams]], mx.array]


def _on(
    logits: mx.array,
    settings: Sequence[SamplingParams],
    wanted: Callable[[SamplingParams], bool],
    change: Filter,
) -> mx.array:
    """`change` on the rows that want it."""
    rows = [row for row, params in enumerate(settings) if wanted(params)]
    if not rows:
        return logits
    return replaced(logits, rows, change(taken(logits, rows), [settings[row] for row in rows]))


def _top_k(logits: mx.array, settings: list[SamplingParams]) -> mx.array:
    keep = _heaviest(_ordered(logits), None, _column([params.top_k for params in settings]))
    return mx.where(keep, logits, -mx.inf)


def _top_p(logits: mx.array, settings: list[SamplingParams]) -> mx.array:
    probs = mx.softmax(logits, axis=-1, precise=True)
    # Never no mass at all, which a top_p too small for float32 would ask for.
    keep = _heaviest(
        _ordered(probs), probs, mx.maximum(_column([params.top_p for params in settings]), 1e-30)
    )
    return mx.where(keep, logits, -mx.inf)


def _min_p(logits: mx.array, settings: list[SamplingParams]) -> mx.array:
    # p < min_p * p_max  <=>  logit < logit_max + log(min_p)
    share = mx.log(_column([params.min_p for params in settings]))
    return mx.where(logits < logits.max(axis=-1, keepdims=True) + share, -mx.inf, logits)


def excludes(params: SamplingParams, key: tuple[int, int], count: int) -> bool:
    """Whether xtc strikes in the draw after `count` tokens: with its probability, by the row's seed."""
    if not params.xtc_probability or params.greedy:
        return False
    words = (*key, count)
    digest = hashlib.blake2b(b"".join(word.to_bytes(8, "little") for word in words), digest_size=8).digest()
    return int.from_bytes(digest, "little") < params.xtc_probability * 2.0**64


def exclude_top(
    logits: mx.array, settings: Sequence[SamplingParams], spared: Sequence[Sequence[int]]
) -> mx.array:
    """xtc: without the tokens more probable than `xtc_threshold`, but for the least probable of them.

    Args:
        logits: `[rows, vocab]`, filtered.
        spared: of each row the tokens that stay in any case.
    """
    probs = mx.softmax(logits, axis=-1, precise=True)
    over = mx.where(probs > _column([params.xtc_threshold for params in settings]), probs, mx.inf)
    without = mx.where(probs > over.min(axis=-1, keepdims=True), -mx.inf, logits)
    rows = np.repeat(np.arange(len(spared), dtype=np.int32), [len(tokens) for tokens in spared])
    if not len(rows):
        return without
    tokens = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in spared])
    known = tokens < logits.shape[-1]
    at = mx.array(rows[known]), mx.array(tokens[known])
    without[at] = logits[at]
    return without


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _ordered(values: mx.array) -> mx.array:
    """int32 that compare as the float32 `values` do."""
    bits = values.view(mx.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _heaviest(order: mx.array, weights: mx.array | None, target: mx.array) -> mx.array:
    """Boolean `[rows, vocab]`: the fewest entries, largest first, whose weights reach `target` `[rows, 1]`.

    Entries equal to the smallest one kept are kept too; entries count 1 where `weights` is None. Finds the
    threshold by bisection over the 32 bits of `order`: several times faster than sorting a vocabulary.
    """
    low = mx.full(target.shape, -(2**31), dtype=mx.int32)
    high = mx.full(target.shape, 2**31 - 1, dtype=mx.int32)
    one, zero = mx.array(1.0), mx.array(0.0)
    for _ in range(32):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = mx.where(order >= middle, one if weights is None else weights, zero)
        enough = reached.sum(axis=-1, keepdims=True) >= target
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return order >= low
