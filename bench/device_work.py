"""What bench/device.py has decoded: prompts of tokens that mean nothing, and the lengths of their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WARM_STEPS = 4
"""Steps that are not timed: they pay for kernels compiled on first use."""


@dataclass(frozen=True)
class Work:
    """What is to be decoded: prompts, and the tokens to answer each with."""

    prompts: list[list[int]]
    answers: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.answers)


def generator_work(rows: int, prompt: int, steps: int, vocab_size: int) -> Work:
    """As `steady_work`, for a BatchGenerator: it takes in up to 8 prompts a step."""
    prompts = [_prompt(index, prompt, vocab_size) for index in range(rows)]
    return Work(prompts, [math.ceil(rows / 8) + steps + 2 * WARM_STEPS] * rows)


def steady_work(rows: int, prompt: int, steps: int, budget: int, vocab_size: int) -> Work:
    """As many prompts as rows, with answers long enough that all rows decode together for `steps` steps."""
    prompts = [_prompt(index, prompt, vocab_size) for index in range(rows)]
    return Work(prompts, [joining_steps(prompts, budget) + steps + 2 * WARM_STEPS] * rows)


def joining_steps(prompts: Sequence[Sequence[int]], budget: int) -> int:
    """An upper bound of the steps until every prompt is prefilled: decode rows take of the budget too."""
    free = max(budget - len(prompts), budget // 4)
    return math.ceil(sum(map(len, prompts)) / free) + 8


def unequal_work(lengths: Sequence[int], steps: int, budget: int, vocab_size: int) -> Work:
    prompts = [_prompt(index, length, vocab_size) for index, length in enumerate(lengths)]
    return Work(prompts, [joining_steps(prompts, budget) + steps + 2 * WARM_STEPS] * len(prompts))


def joins_work(rows: int, prompt: int, vocab_size: int) -> Work:
    """Twice as many requests as rows; prompts and answers of half to one and a half times `prompt` tokens, so
    that rows end, and others take their places, at different steps."""
    count = 2 * rows
    spread = [prompt // 2 + (index * 37) % (prompt + 1) for index in range(2 * count)]
    prompts = [_prompt(index, length, vocab_size) for index, length in enumerate(spread[:count])]
    return Work(prompts, spread[count:])


def _prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return [(seed * 7919 + position * 31) % (vocab_size - 3) + 1 for position in range(length)]
