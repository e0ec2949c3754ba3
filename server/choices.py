"""Several answers to one prompt: `n` and `best_of`.

Each is a request of its own, with a seed made of the client's and its index, so that a choice is the same
whatever the others do. The engine computes their prompt once where it keeps prefixes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.engine.output.stream import WholeAnswer
from chairlift.engine.request import Request
from chairlift.server.errors import invalid

MAX_CHOICES = 128
"""Answers to one body that draws several a prompt; OpenAI's bound of `n`."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What every prompt of a body gets."""

    shown: int = 1
    """`n`."""
    drawn: int = 1
    """`best_of`: those with the highest log probability per token are shown."""

    @property
    def ranked(self) -> bool:
        return self.drawn > self.shown

    def requests(self, prompts: Sequence[Request]) -> tuple[Request, ...]:
        """A request for every answer, those of a prompt one after the other."""
        return tuple(_sibling(prompt, index) for prompt in prompts for index in range(self.drawn))

    def best(self, answers: Sequence[WholeAnswer]) -> list[WholeAnswer]:
        """The answers to show, prompt by prompt; where they are ranked the best first, ties as drawn."""
        if not self.ranked:
            return list(answers)
        shown: list[WholeAnswer] = []
        for start in range(0, len(answers), self.drawn):
            group = answers[start : start + self.drawn]
            shown += sorted(group, key=_mean_logprob, reverse=True)[: self.shown]
        return shown


def choices_of(
    n: int | None, best_of: int | None = None, *, prompts: int = 1, stream: bool = False
) -> Choices:
    """Raises: APIError naming what cannot be had."""
    shown = 1 if n is None else n
    drawn = shown if best_of is None else best_of
    if shown < 1:
        raise invalid(f"n must be at least 1, not {shown}.", "n", "invalid_value")
    if drawn < shown:
        raise invalid(f"best_of must be at least n, {shown}, not {drawn}.", "best_of", "invalid_value")
    if drawn > shown and stream:
        raise invalid("best_of above n cannot be streamed.", "best_of", "invalid_value")
    if drawn > 1 and prompts * drawn > MAX_CHOICES:
        name = "n" if best_of is None else "best_of"
        raise invalid(
            f"{name} times the prompts is {prompts * drawn}; at most {MAX_CHOICES}.", name, "invalid_value"
        )
    return Choices(shown, drawn)


def _sibling(prompt: Request, index: int) -> Request:
    """The prompt's answer number `index`; number 0 is what a body without `n` gets."""
    if index == 0:
        return prompt
    sampling = prompt.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sibling_seed(sampling.seed, index))
    return replace(prompt, request_id=f"{prompt.request_id}.{index}", sampling=sampling)


def sibling_seed(seed: int, index: int) -> int:
    """0 .. 2**64-1, unrelated to the seeds of other indexes and of neighbouring seeds."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mean_logprob(answer: WholeAnswer) -> float:
    values = [token.logprob for token in answer.logprobs]
    return sum(values) / len(values) if values else 0.0
