"""What a request gets alone: greedy answers by mlx-lm's own `generate_step` on plain caches, unpatched.

The reference of every parity test. Answers are kept per family and prompt, the longest asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from chairlift.patches import apply_patches, undo_patches
from tests.mlx.configs import VOCABULARY

TIE = 1e-5
"""Two candidates closer than this (natural log of probability) are a tie in float32: either may be drawn."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer alone.

    Attributes:
        tokens: the tokens drawn.
        logprobs: of each token drawn, natural logarithm.
        gaps: how far the second candidate was behind, each time.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


def prompt(length: int, seed: int = 0) -> Prompt:
    """A random prompt of `length` tokens."""
    draw = random.Random(f"{length}/{seed}")
    return tuple(draw.randrange(VOCABULARY) for _ in range(length))


@contextmanager
def upstream_as_it_is() -> Iterator[None]:
    """mlx-lm without any patch of ours."""
    undo_patches()
    try:
        yield
    finally:
        apply_patches()


@dataclass(slots=True)
class Solo:
    """Solo runs of one model, as one caller after the other would get them.

    Attributes:
        model: built by `tests.mlx.families.build`.
        mended: run under our patches, where upstream's own answer is not well defined; else without.
        caches: makes the caches of a run; None for the model's own.
    """

    model: Any
    mended: bool = False
    caches: Callable[[], list[Any]] | None = None
    _answers: dict[Prompt, Answer] = field(default_factory=dict)

    def answer(self, tokens: Prompt, count: int) -> Answer:
        """The first `count` tokens (or more) of the greedy answer to a prompt."""
        known = self._answers.get(tokens)
        if known is None or len(known.tokens) < count:
            known = self._answers[tokens] = self._run(tokens, count)
        return known

    def _run(self, tokens: Prompt, count: int) -> Answer:
        with nullcontext() if self.mended else upstream_as_it_is():
            caches = self.caches() if self.caches is not None else None
            steps = list(generate_step(mx.array(tokens), self.model, max_tokens=count, prompt_cache=caches))
        logprobs = mx.stack([row for _, row in steps])
        best = mx.topk(logprobs, 2, axis=-1)
        return Answer(
            tuple(int(token) for token, _ in steps),
            tuple(best.max(axis=-1).tolist()),
            tuple((best.max(axis=-1) - best.min(axis=-1)).tolist()),
        )
