"""Log probabilities of drawn tokens and of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from chairlift.engine.request import SamplingParams
from chairlift.engine.sampling.blocks import highest
from chairlift.engine.sampling.rows import taken

Scores = tuple[mx.array | None, mx.array | None, mx.array | None]


def scored_rows(settings: Sequence[SamplingParams]) -> tuple[int, ...]:
    """The rows that asked for log probabilities."""
    return tuple(row for row, params in enumerate(settings) if params.logprobs is not None)


def logprobs(
    logits: mx.array, tokens: mx.array, settings: Sequence[SamplingParams], rows: Sequence[int]
) -> Scores:
    """(of the drawn tokens, top tokens, their logprobs) of `rows`, under the model's own distribution."""
    if not rows:
        return None, None, None
    wanted = max(settings[row].logprobs or 0 for row in rows)
    return scores(taken(logits, rows), taken(tokens, rows), wanted)


def scores(
    logits: mx.array, tokens: mx.array, wanted: int
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """(of `tokens`, `wanted` top tokens, their logprobs) of float32 logits `[rows, vocab]`."""
    wanted = min(wanted, logits.shape[-1])
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm
    if wanted == 0:
        return drawn[:, 0], None, None
    top, values = highest(logits, wanted)
    return drawn[:, 0], top, values - norm
