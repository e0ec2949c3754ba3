"""The draw: where a random share of a row's whole weight falls, by a number of the row's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.blocks import at_share
from chairlift.engine.sampling.filters import exclude_top, excludes, uniform, weights
from chairlift.engine.sampling.logprobs import logprobs, scored_rows
from chairlift.engine.sampling.mask import Mask, masked
from chairlift.engine.sampling.rows import replaced, taken
from chairlift.engine.sampling.shaping import Counted, Shaping, shaped

MOST = 1 - 2.0**-24
"""The largest share: below 1 also as a float32."""


@dataclass(slots=True)
class Draw:
    """How one row draws its next token. Not frozen, which would triple what it costs to make one: every step
    makes one for each row.

    Attributes:
        key: of the row's seed.
        count: tokens that it has drawn before.
        shaping: what it adds to its logits; None for nothing.
        spared: tokens that xtc leaves alone.
    """

    sampling: SamplingParams
    key: tuple[int, int]
    count: int
    shaping: Shaping | None = None
    spared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step draws, on the device.

    Attributes:
        tokens: int32 `[rows]`.
        valid: bool `[rows]`; False where the row's logits are no distribution: NaN, +inf, or all -inf.
        scored: the rows that asked for log probabilities; the rest is of them only.
        logprobs: float32 `[scored]` of the drawn tokens, or None if no row asked.
        top_tokens, top_logprobs: `[scored, n]`, most probable first, for the largest n asked for.
        left: bool `[rows]`; False where mask and settings together leave no token. None without either.
    """

    tokens: mx.array
    valid: mx.array
    scored: tuple[int, ...] = ()
    logprobs: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None
    left: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self.tokens, self.valid, self.logprobs, self.top_tokens, self.top_logprobs, self.left)
        return [part for part in parts if part is not None]


def row_key(seed: int) -> tuple[int, int]:
    """Two well-mixed 32-bit words for a seed, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def sample(logits: mx.array, draws: Sequence[Draw], mask: Mask | None = None) -> Drawn:
    """Draw one token per row, and count it where the row's penalties ask for that (`Shaping.tally`).

    Args:
        logits: `[rows, vocab]`, any float type.
        draws: one per row, in order.
        mask: of constraints; what it leaves out is never drawn.
    """
    logits = logits.astype(mx.float32)
    settings = [draw.sampling for draw in draws]
    shapings = [draw.shaping for draw in draws]
    counted = Counted(shapings, logits.shape[-1])
    free = shaped(logits, shapings, [draw.count for draw in draws], counted)
    if mask is not None:
        free = masked(free, mask)
    tokens = _tokens(free, draws)
    counted.count(tokens)
    valid = mx.isfinite(logits.max(axis=-1)) & mx.logical_not(mx.isnan(logits.sum(axis=-1)))
    rows = scored_rows(settings)
    left = None
    if free is not logits:
        left = mx.isfinite(mx.take_along_axis(free, tokens[:, None], axis=-1)[:, 0])
    return Drawn(tokens, valid, rows, *logprobs(logits, tokens, settings, rows), left)


def _tokens(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """int32 `[rows]`: the most probable token of greedy rows, a draw of the others."""
    warm = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if not warm:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    some = [draws[row] for row in warm]
    part = weights(taken(logits, warm), [draw.sampling for draw in some])
    struck = [row for row, draw in enumerate(some) if excludes(draw.sampling, draw.key, draw.count)]
    if struck:
        hit = [some[row] for row in struck]
        spared = [draw.spared for draw in hit]
        left = exclude_top(taken(part, struck), [draw.sampling for draw in hit], spared)
        part = replaced(part, struck, left)
    shares = mx.array([uniform(draw.key, draw.count, b"token") for draw in some], dtype=mx.float32)
    drawn = at_share(part, mx.minimum(shares, MOST))
    if len(warm) < len(draws):
        drawn = replaced(mx.argmax(logits, axis=-1).astype(drawn.dtype), warm, drawn)
    return drawn.astype(mx.int32)
