"""How probable a prompt's own tokens are, for rows that ask: computed with their prefill, a piece at a time.

Logits of a prompt are `[tokens, vocab]`, more than its states. So no more than `PIECE` tokens have theirs at
once: the pieces of a chunk are computed one after the other, and of each only the scores stay. All functions
run on the MLX thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from chairlift.engine.plan import PromptPart, Sample
from chairlift.engine.sampling.logprobs import scores

PIECE = 128
"""Tokens."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of a prompt's tokens [start, start + len(tokens)), on the device.

    Attributes:
        logprobs: float32 `[tokens]`, each token's under the distribution that the tokens before it make.
        top_tokens, top_logprobs: `[tokens, n]`, most probable first; None for n = 0.
    """

    start: int
    tokens: tuple[int, ...]
    logprobs: mx.array
    top_tokens: mx.array | None
    top_logprobs: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self.logprobs, self.top_tokens, self.top_logprobs)
        return [part for part in parts if part is not None]

    def read(self) -> PromptPart | None:
        """On the host; None where a score is not a number."""
        logprobs: Any = self.logprobs.tolist()
        if any(map(math.isnan, logprobs)):
            return None
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(self.tokens)
        if self.top_tokens is not None and self.top_logprobs is not None:
            ids: Any = self.top_tokens.tolist()
            values: Any = self.top_logprobs.tolist()
            tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return PromptPart(self.start, tuple(map(Sample, self.tokens, logprobs, tops)))


def pieces_of(pieces: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same tokens in pieces of at most `PIECE`."""
    return [piece[at : at + PIECE] for piece in pieces for at in range(0, len(piece), PIECE)]


def score(logits: mx.array, prompt: Sequence[int], held: int, wanted: int) -> PromptScores | None:
    """Of the tokens that stand behind those which the logits are of; None where these are no prompt's.

    Args:
        logits: `[tokens, vocab]`, of the tokens from position `held` on.
        prompt: all of its tokens.
        wanted: most probable tokens told beside each.
    """
    tokens = tuple(prompt[held + 1 : held + 1 + logits.shape[0]])
    if not tokens:
        return None
    logits = logits[: len(tokens)].astype(mx.float32)
    found = PromptScores(held + 1, tokens, *scores(logits, mx.array(tokens, dtype=mx.int32), wanted))
    mx.eval(found.arrays)  # before the next piece has its logits
    return found
