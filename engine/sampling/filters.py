"""What each token weighs in a row's draw: temperature, then top_k, top_p, min_p, xtc.

Filters work on weights, which are probabilities until one has dropped some. The order of the first is that
of vLLM and mlx-lm. xtc ("exclude top choices") is mlx-lm's, but goes by the probabilities that the token is
drawn with: at the row's temperature, behind the other filters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.blocks import BLOCK, highest
from chairlift.engine.sampling.rows import replaced, taken

_COLDEST = 1e-7
"""Temperatures below count as this, under which logits that differ at all are drawn greedily: smaller ones
take logits out of float32."""


def weights(logits: mx.array, settings: Sequence[SamplingParams]) -> mx.array:
    """`[rows, vocab]` of logits: probabilities at each row's temperature, 0 where a filter drops one."""
    heat = [max(params.temperature, _COLDEST) for params in settings]
    if any(value != 1.0 for value in heat):
        logits = logits / _column(heat)
    weights = mx.softmax(logits, axis=-1, precise=True)
    vocab = logits.shape[-1]
    weights = _on(weights, settings, lambda params: 0 < params.top_k < vocab, _top_k)
    weights = _on(weights, settings, lambda params: params.top_p < 1, _top_p)
    return _on(weights, settings, lambda params: params.min_p > 0, _min_p)


Filter = Callable[[mx.array, list[SamplingParams]], mx.array]


def _on(
    weights: mx.array,
    settings: Sequence[SamplingParams],
    wanted: Callable[[SamplingParams], bool],
    change: Filter,
) -> mx.array:
    """`change` on the rows that want it."""
    rows = [row for row, params in enumerate(settings) if wanted(params)]
    if not rows:
        return weights
    return replaced(weights, rows, change(taken(weights, rows), [settings[row] for row in rows]))


# Where a mask is applied it multiplies: on a CPU several times faster than a choice between two arrays.


def _top_k(weights: mx.array, settings: list[SamplingParams]) -> mx.array:
    counts = [params.top_k for params in settings]
    if max(counts) * BLOCK < weights.shape[1]:
        _, found = highest(weights, max(counts))
        last = mx.take_along_axis(found, mx.array(counts, dtype=mx.int32)[:, None] - 1, axis=-1)
        return weights * (weights >= last)
    return weights * _heaviest(weights, None, _column(counts))


def _top_p(weights: mx.array, settings: list[SamplingParams]) -> mx.array:
    # Never no mass at all, which a top_p too small for float32 would ask for.
    share = mx.maximum(_column([params.top_p for params in settings]), 1e-30)
    return weights * _heaviest(weights, weights, share * weights.sum(axis=-1, keepdims=True))


def _min_p(weights: mx.array, settings: list[SamplingParams]) -> mx.array:
    least = _column([params.min_p for params in settings]) * weights.max(axis=-1, keepdims=True)
    return weights * (weights >= least)


def excludes(params: SamplingParams, key: tuple[int, int], count: int) -> bool:
    """Whether xtc strikes in the draw after `count` tokens: with its probability, by the row's seed."""
    return bool(params.xtc_probability) and uniform(key, count, b"xtc") < params.xtc_probability


def uniform(key: tuple[int, int], count: int, purpose: bytes) -> float:
    """0 <= number < 1, made of the arguments: a row's random numbers are counted, not carried on."""
    words = b"".join(word.to_bytes(8, "little") for word in (*key, count))
    digest = hashlib.blake2b(words, digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def exclude_top(
    weights: mx.array, settings: Sequence[SamplingParams], spared: Sequence[Sequence[int]]
) -> mx.array:
    """xtc: without the tokens more probable than `xtc_threshold`, but for the least probable of them.

    Args:
        weights: `[rows, vocab]`, filtered.
        spared: of each row the tokens that stay in any case.
    """
    threshold = _column([params.xtc_threshold for params in settings])
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


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _heaviest(weights: mx.array, counted: mx.array | None, target: mx.array) -> mx.array:
    """Boolean `[rows, vocab]`: the fewest entries, largest first, whose `counted` reach `target` `[rows, 1]`.

    Entries equal to the smallest one kept are kept too; entries count 1 where `counted` is None. Finds the
    threshold by bisection over the bits of float32, which order non-negative numbers as integers do: several
    times faster than sorting a vocabulary.
    """
    order = weights.view(mx.int32)
    low = mx.zeros(target.shape, dtype=mx.int32)
    high = order.max(axis=-1, keepdims=True) + 1
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        over = order >= middle
        reached = over if counted is None else over * counted
        enough = reached.sum(axis=-1, keepdims=True) >= target
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return order >= low
