"""The masks of constraints: from packed bits to logits that leave out what a row may not draw."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from chairlift.engine.sampling.rows import replaced, taken

_WORD = 32


@dataclass(frozen=True, slots=True)
class Mask:
    """What some rows of a batch may draw.

    Attributes:
        rows: which, ascending.
        bits: uint32 `[len(rows), words]`: bit t % 32 of word t // 32 is set where token t may be drawn.
    """

    rows: tuple[int, ...]
    bits: mx.array


def masked(logits: mx.array, mask: Mask) -> mx.array:
    """Logits `[rows, vocab]`, -inf for what the mask leaves out. Other rows pass unchanged."""
    part = taken(logits, mask.rows)
    part = mx.where(expanded(mask.bits, logits.shape[-1]), part, -mx.inf)
    return replaced(logits, mask.rows, part)


def expanded(bits: mx.array, vocab: int) -> mx.array:
    """bool `[rows, vocab]` of uint32 `[rows, words]`; logits beyond the last word belong to no token."""
    rows, words = bits.shape
    spread = (bits[:, :, None] >> mx.arange(_WORD, dtype=mx.uint32)) & 1
    allowed = spread.reshape(rows, words * _WORD).astype(mx.bool_)
    if vocab <= words * _WORD:
        return allowed[:, :vocab]
    return mx.pad(allowed, [(0, 0), (0, vocab - words * _WORD)])
