"""Steps nobody waits for, before the first request.

A GPU compiles its kernels when they are first used: on an H200 the first joins of a fresh process took 4 to
15 seconds each. So the shapes of a busy server's steps are run once while it starts: rows that join in one
step and in several, prompts in chunks, rows of unequal length, a row that leaves, sampled rows beside greedy,
rows with settings of every kind.

On CUDA a matrix product also costs some 20 ms when a number of tokens first comes (cuBLAS plans it, and loads
its kernels): those that steps are likely to have are had before.
"""

from __future__ import annotations

from collections.abc import Callable

from chairlift.cache.device import on_cuda
from chairlift.engine.flat import GRAIN
from chairlift.engine.plan import NewRow, Runner, Span, StepPlan
from chairlift.engine.request import SamplingParams

_SETTINGS = (
    SamplingParams(
        temperature=0,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        min_tokens=1,
    ),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(temperature=0, logprobs=2, allowed_token_ids=(0, 1)),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, xtc_probability=1.0),
)
_PROMPTS = (5, 96, 33, 160)
MOST_ROWS = 48
"""Numbers of rows that decode together, from one."""
MOST_TOKENS = 1024
"""Of a step with prompts, which comes in multiples of GRAIN."""


def warm_up(runner: Runner, vocab_size: int, longest: int = MOST_TOKENS, *, together: bool = True) -> None:
    """Run the steps through `runner`, which holds no row afterwards. Runs on the MLX thread.

    Args:
        longest: tokens of a prompt that the model takes.
        together: rows that decode share a forward.
    """
    rows = {-1 - index: length for index, length in enumerate(_PROMPTS)}
    number = 0

    def step(**parts: object) -> None:
        nonlocal number
        number += 1
        runner.step(StepPlan(-1000 + number, **parts))  # type: ignore[arg-type]

    def new(row: int) -> NewRow:
        return NewRow(row, _SETTINGS[-1 - row], seed=0)

    def span(row: int, start: int, stop: int) -> Span:
        tokens = tuple((31 * place) % vocab_size for place in range(start, stop))
        return Span(row, start, tokens, last=stop == rows[row])

    step(admit=(new(-1), new(-2)), prefill=(span(-1, 0, 5), span(-2, 0, 48)))
    step(admit=(new(-3),), prefill=(span(-2, 48, 96), span(-3, 0, 33)), decode=(-1,))
    step(decode=(-1, -2, -3))
    step(admit=(new(-4),), prefill=(span(-4, 0, 160),), decode=(-1, -2, -3))
    for _ in range(3):
        step(decode=(-1, -2, -3, -4))
    step(release=(-2,), decode=(-1, -3, -4))
    step(decode=(-1, -3, -4))
    step(release=tuple(rows))
    if on_cuda():
        _plan_products(step, vocab_size, min(longest, MOST_TOKENS), MOST_ROWS if together else 0)
    step()


def _plan_products(step: Callable[..., None], vocab_size: int, longest: int, most_rows: int) -> None:
    """Steps of every usual number of tokens, of prompts and then of rows."""
    greedy, number = SamplingParams(temperature=0), -100
    for tokens in range(GRAIN, longest + 1, GRAIN):
        number -= 1
        prompt = tuple((31 * place) % vocab_size for place in range(tokens))
        step(admit=(NewRow(number, greedy, seed=0),), prefill=(Span(number, 0, prompt, last=True),))
        step(release=(number,))
    rows = [number - 1 - index for index in range(most_rows)]
    step(
        admit=tuple(NewRow(row, greedy, seed=0) for row in rows),
        prefill=tuple(Span(row, 0, (1 % vocab_size, 2 % vocab_size), last=True) for row in rows),
    )
    for count in range(most_rows, 0, -1):
        step(decode=tuple(rows[:count]), release=tuple(rows[count : count + 1]))
    step(release=tuple(rows[:1]))
