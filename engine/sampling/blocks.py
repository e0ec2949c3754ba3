"""A vocabulary in blocks, so that searching it costs little more than reading it once."""

from __future__ import annotations

import mlx.core as mx

BLOCK = 128
"""Tokens: vocabularies of tens of thousands make hundreds of blocks."""


def blocks(values: mx.array, fill: float) -> mx.array:
    """`[rows, blocks, BLOCK]` of `[rows, vocab]`; what the last block lacks is `fill`."""
    rows, vocab = values.shape
    missing = -vocab % BLOCK
    if missing:
        values = mx.pad(values, [(0, 0), (0, missing)], constant_values=fill)
    return values.reshape(rows, -1, BLOCK)


def highest(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(tokens, their values) `[rows, count]` of the `count` highest of `[rows, vocab]`, highest first.

    They lie in the `count` blocks of the highest maxima, so no more than those are partitioned.
    """
    tokens, candidates = None, values
    if count * BLOCK < values.shape[1]:
        parts = blocks(values, -mx.inf)
        chosen = mx.argpartition(-parts.max(axis=-1), kth=count - 1, axis=-1)[:, :count, None]
        candidates = mx.take_along_axis(parts, chosen, axis=1).flatten(1)
        tokens = (chosen * BLOCK + mx.arange(BLOCK, dtype=chosen.dtype)).flatten(1)
    first = mx.argpartition(-candidates, kth=count - 1, axis=-1)[:, :count]
    found = mx.take_along_axis(candidates, first, axis=-1)
    order = mx.argsort(-found, axis=-1)
    first = mx.take_along_axis(first, order, axis=-1)
    if tokens is not None:
        first = mx.take_along_axis(tokens, first, axis=-1)
    return first, mx.take_along_axis(found, order, axis=-1)


def at_share(weights: mx.array, shares: mx.array) -> mx.array:
    """`[rows]`: where the running sum of `weights` `[rows, vocab]` passes `shares` `[rows]` of the whole,
    0 <= share < 1: a draw with these weights. Never an entry of weight 0 where one has more.

    By blocks, then within one: no running sum over a vocabulary, whose rounding would grow with it.
    """
    parts = blocks(weights, 0.0)
    sums = parts.sum(axis=-1)
    before, block = _pass(sums, shares[:, None] * sums.sum(axis=-1, keepdims=True))
    inside = mx.take_along_axis(parts, block[:, :, None], axis=1)[:, 0]
    _, place = _pass(inside, before)
    # A row that is not a number may fall anywhere: on a token of the vocabulary at least.
    return mx.minimum(block * BLOCK + place, weights.shape[1] - 1)[:, 0]


def _pass(weights: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """(what of `target` is left at the entry, the entry), `[rows, 1]`: the first of weight above 0 behind
    which the running sum exceeds `target`. Where rounding leaves none, the heaviest."""
    running = mx.cumsum(weights, axis=-1)
    passed = (running > target) & (weights > 0)
    first = mx.argmax(passed, axis=-1, keepdims=True)
    found = mx.where(
        mx.take_along_axis(passed, first, axis=-1), first, mx.argmax(weights, axis=-1, keepdims=True)
    )
    behind = mx.take_along_axis(running, found, axis=-1) - mx.take_along_axis(weights, found, axis=-1)
    return target - behind, found
