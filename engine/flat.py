"""The tokens of a flat step: decode rows first, then the chunks of prompts, then padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from chairlift.cache.device import on_cuda
from chairlift.cache.views import SpanStep
from chairlift.engine.plan import Span

Split = tuple[Callable[..., mx.array], Callable[[mx.array], mx.array]]
"""A model's body and head."""
GRAIN = 32
"""On CUDA a step with prefill is padded to a multiple of this many tokens: every new number of tokens costs
milliseconds of planning."""


@dataclass(frozen=True, slots=True)
class FlatStep:
    """
    Attributes:
        positions: of every token, the decode rows' and the padding's included.
        tokens: those that the host knows: of the chunks, and the padding.
        spans: where each chunk lies among all tokens, and in its row.
        ending: index of the last token of each row whose prompt ends, in order.
        padding: tokens at the end that belong to nobody.
    """

    positions: list[int]
    tokens: list[int]
    spans: list[SpanStep]
    ending: dict[int, int]
    padding: int

    @classmethod
    def of(cls, lengths: Sequence[int], spans: Sequence[Span]) -> FlatStep:
        """For decode rows that hold `lengths` tokens, and these chunks."""
        positions, tokens = list(lengths), list[int]()
        steps, ending = list[SpanStep](), dict[int, int]()
        for span in spans:
            start, stop = len(positions), len(positions) + len(span.tokens)
            steps.append(SpanStep(start, stop, span.start))
            positions += range(span.start, span.start + len(span.tokens))
            tokens += span.tokens
            if span.last:
                ending[span.row] = stop - 1
        padding = -len(positions) % GRAIN if spans and on_cuda() else 0
        return cls(positions + [0] * padding, tokens + [0] * padding, steps, ending, padding)


def logits_of(
    forward: Callable[..., mx.array],
    split: Split | None,
    inputs: mx.array,
    caches: list[Any],
    wanted: Sequence[int],
    told: dict[str, mx.array],
) -> mx.array:
    """Logits `[len(wanted), vocab]` of the wanted tokens of a flat step `[tokens, 1]`."""
    everything = list(wanted) == list(range(inputs.shape[0]))
    if split is None:
        logits = forward(inputs, caches, **told)[:, -1]
        return logits if everything else logits[mx.array(list(wanted), dtype=mx.int32)]
    body, head = split
    hidden = body(inputs, cache=caches, **told)
    if not everything:
        hidden = hidden[mx.array(list(wanted), dtype=mx.int32)]
    return head(hidden)[:, -1]
