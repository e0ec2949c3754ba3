"""A step between its launch and its landing, and what is said of faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from chairlift.engine.constraints.matcher import Matcher
from chairlift.engine.plan import PromptPart, Sample
from chairlift.engine.prefix.vocabulary import Restore, Save
from chairlift.engine.prompt_scores import PromptScores
from chairlift.engine.sampling import Draw, Drawn
from chairlift.engine.sight import SightError
from chairlift.engine.thinking import ThinkingCount

NOT_A_NUMBER = "The model's output is not a number for this request."
NOTHING_LEFT = "The settings and the constraint of this request together allow no token."


@dataclass(slots=True)
class Undrawn:
    """Logits `[rows, vocab]` of a step on the device, one row for each of `draws`."""

    logits: mx.array
    draws: list[Draw]


@dataclass(slots=True)
class Flight:
    """A step on the device whose tokens the host has not read yet."""

    number: int
    rows: tuple[int, ...] = ()
    drawing: list[int] = field(default_factory=list)
    restored: dict[int, Restore] = field(default_factory=dict)
    """What rows that draw began with."""
    wanted: dict[int, int | None] = field(default_factory=dict)
    undrawn: Undrawn | None = None
    """What the draw is made from, until it is made: constraints need the tokens of the step before."""
    drawn: Drawn | None = None
    followed: dict[int, Matcher] = field(default_factory=dict)
    """Constraints, by row."""
    thinking: dict[int, ThinkingCount] = field(default_factory=dict)
    """Of rows whose thinking is bounded and not over."""
    arrays: list[mx.array] = field(default_factory=list)
    states: dict[int, list[mx.array]] = field(default_factory=dict)
    """Of rows with caches of their own, by row."""
    saves: list[Save] = field(default_factory=list)
    scored: list[tuple[int, PromptScores]] = field(default_factory=list)
    """Parts of prompts, by row, in order."""
    parts: dict[int, tuple[PromptPart, ...]] = field(default_factory=dict)
    """What was read of them."""
    encoded: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def outputs(self) -> list[mx.array]:
        drawn = self.drawn.arrays if self.drawn is not None else []
        undrawn = [self.undrawn.logits] if self.undrawn is not None else []
        states = (array for arrays in self.states.values() for array in arrays)
        return [*drawn, *undrawn, *self.arrays, *states]

    def forget(self) -> None:
        """Nothing was drawn after all."""
        self.undrawn, self.drawn, self.drawing = None, None, []
        self.arrays, self.states, self.scored = [], {}, []

    def read(self) -> dict[int, Sample]:
        """The drawn tokens, on the host; constraints follow them. Rows whose logits are not a number or leave
        nothing to draw go to `failed` instead."""
        for row, found in self.scored:
            if (part := found.read()) is None:
                self.failed.setdefault(row, NOT_A_NUMBER)
            else:
                self.parts[row] = (*self.parts.get(row, ()), part)
        drawn = self.drawn
        if drawn is None:
            return {}
        tokens: Any = drawn.tokens.tolist()
        valid: Any = drawn.valid.tolist()
        logprobs: Any = drawn.logprobs.tolist() if drawn.logprobs is not None else None
        tops: Any = drawn.top_tokens.tolist() if drawn.top_tokens is not None else None
        top_logprobs: Any = drawn.top_logprobs.tolist() if drawn.top_logprobs is not None else None
        left: Any = drawn.left.tolist() if drawn.left is not None else None
        scores = {at: index for index, at in enumerate(drawn.scored)}
        samples = {}
        for at, row in enumerate(self.drawing):
            if row in self.failed:
                continue
            if not valid[at] or (left is not None and not left[at]):
                self.failed[row] = NOTHING_LEFT if valid[at] else NOT_A_NUMBER
                continue
            if row in self.followed:
                self.followed[row].advance(tokens[at])
            if row in self.thinking:
                self.thinking[row].advance(tokens[at])
            wanted = self.wanted[row]
            if wanted is None:
                samples[row] = Sample(tokens[at])
                continue
            score = scores[at]
            pairs = zip(tops[score][:wanted], top_logprobs[score][:wanted], strict=True) if wanted else ()
            samples[row] = Sample(tokens[at], logprobs[score], tuple(pairs))
        return samples


def blame(error: Exception) -> str:
    """One line for the client; the log holds the rest."""
    if isinstance(error, SightError):
        return str(error)
    return f"The model step failed ({type(error).__name__})."
