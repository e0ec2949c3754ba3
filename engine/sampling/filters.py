"""What each token weighs in a row's draw: temperature, then top_k, top_p, min_p, xtc.

Filters work on weights, which are probabilities until one has dropped some. The order of the first is that
of vLLM and mlx-lm. xtc ("exclude top choices") is mlx-lm's, but goes by the probabilities that the token is
drawn with: at the row's temperature, behind the other filters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.blocks import BLOCK, highest
from chairlift.engine.sampling.rows import column, replaced, taken

_COLDEST = 1e-7
"""Temperatures below count as this, under which logits that differ at all are drawn greedily: smaller ones
take logits out of float32."""


def weights(logits: mx.array, settings: Sequence[SamplingParams]) -> mx.array:
    """`[rows, vocab]` of logits: probabilities at each row's temperature, 0 where a filter drops one."""
    heat = [max(params.temperature, _COLDEST) for params in settings]
    if any(value != 1.0 for value in heat):
        logits = logits / column(heat)
    weights = mx.softmax(logits, axis=-1, precise=True)
    vocab = logits.shape[-1]
    few = [row for row, params in enumerate(settings) if 0 < params.top_k < vocab]
    many = [row for row, params in enumerate(settings) if params.top_p < 1 and row not in few]
    most = max((settings[row].top_k for row in few), default=0)
    weights = _on(weights, settings, few, lambda part, chosen: _top(part, chosen, most))
    weights = _on(weights, settings, many, lambda part, chosen: _top(part, chosen, vocab))
    sharp = [row for row, params in enumerate(settings) if params.min_p > 0]
    return _on(weights, settings, sharp, _min_p)


Filter = Callable[[mx.array, list[SamplingParams]], mx.array]


def _on(weights: mx.array, settings: Sequence[SamplingParams], rows: list[int], change: Filter) -> mx.array:
    """`change` on some rows."""
    if not rows:
        return weights
    return replaced(weights, rows, change(taken(weights, rows), [settings[row] for row in rows]))


# Where a mask is applied it multiplies: on a CPU several times faster than a choice between two arrays.


def _top(weights: mx.array, settings: list[SamplingParams], most: int) -> mx.array:
    """top_k and top_p. Tokens that weigh as much as the lightest one kept are kept too.

    Args:
        most: tokens that the rows' top_k keep, or the vocabulary for rows without.
    """
    vocab = weights.shape[1]
    if most * BLOCK < vocab:
        _, found = highest(weights, most)
    else:
        found = -mx.sort(-weights, axis=-1)
    last = [min(params.top_k, vocab) - 1 if params.top_k else vocab - 1 for params in settings]
    at = mx.array(last, dtype=mx.int32)[:, None]
    if any(params.top_k for params in settings):
        weights = weights * (weights >= mx.take_along_axis(found, at, axis=-1))
    if any(params.top_p < 1 for params in settings):
        # Never no mass at all, which a top_p too small for float32 would ask for.
        share = mx.maximum(column([params.top_p for params in settings]), 1e-30)
        enough = mx.cumsum(found, axis=-1) >= share * weights.sum(axis=-1, keepdims=True)
        # Sums stray by rounding: rows without the filter are left out, and a share near 1 may be missed.
        passed = enough.any(axis=-1, keepdims=True) & mx.array([[params.top_p < 1] for params in settings])
        reached = mx.where(passed, mx.argmax(enough, axis=-1, keepdims=True), at)
        weights = weights * (weights >= mx.take_along_axis(found, mx.minimum(reached, at), axis=-1))
    return weights


def _min_p(weights: mx.array, settings: list[SamplingParams]) -> mx.array:
    least = column([params.min_p for params in settings]) * weights.max(axis=-1, keepdims=True)
    return weights * (weights >= least)


def excludes(params: SamplingParams, key: tuple[int, int], count: int) -> bool:
    """Whether xtc strikes in the draw after `count` tokens: with its probability, by the row's seed."""
    return bool(params.xtc_probability) and uniform(key, count, b"xtc") < params.xtc_probability


def uniform(key: tuple[int, int], count: int, purpose: bytes) -> float:
    """0 <= number < 1, made of the arguments: a row's random numbers are counted, not carried on."""
    state = _begun(key, purpose).copy()
    state.update(count.to_bytes(8, "little"))
    return (int.from_bytes(state.digest(), "little") >> 11) * 2.0**-53


@lru_cache(maxsize=4096)
def _begun(key: tuple[int, int], purpose: bytes) -> hashlib.blake2b:
    """The hash over what all of a row's draws share; only ever copied."""
    words = b"".join(word.to_bytes(8, "little") for word in key)
    return hashlib.blake2b(words, digest_size=8, person=purpose)


def exclude_top(
    weights: mx.array, settings: Sequence[SamplingParams], spared: Sequence[Sequence[int]]
) -> mx.array:
    """xtc: without the tokens more probable than `xtc_threshold`, but for the least probable of them.

    Args:
        weights: `[rows, vocab]`, filtered.
        spared: of each row the tokens that stay in any case.
    """
    threshold = column([params.xtc_threshold for params in settings])
    over = mx.where(weights > threshold * weights.sum(axis=-1, keepdims=True), weights, mx.inf)
    without = weights * (weights <= over.min(axis=-1, keepdims=True))
    rows = np.repeat(np.arange(len(spared), dtype=np.int32), [len(tokens) for tokens in spared])
    if not len(rows):
        return without
    tokens = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in spared])
    known = tokens < weights.shape[-1]
    at = mx.array(rows[known]), mx.array(tokens[known])
    without[at] = weights[at]
    return without
