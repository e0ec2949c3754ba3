"""The runner's decode step, timed: what bench/settings.py and bench/constraints.py share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
from machine import machine

from chairlift.engine.plan import NewRow, Runner, Span, StepPlan

WARM_STEPS = 3
"""Steps that are not timed."""


def device() -> str:
    """What is measured on."""
    return machine() if mx.default_device() == mx.cpu else str(mx.device_info()["device_name"])


def prompts(rows: int, tokens: int, vocab: int) -> list[tuple[int, ...]]:
    return [tuple((7 * row + 31 * place) % vocab for place in range(tokens)) for row in range(rows)]


def decode_times(runner: Runner, rows: Sequence[NewRow], steps: int, numbers: Iterator[int]) -> list[float]:
    """Milliseconds of each step that decodes these rows, behind their prompts. On a CPU processor time, which
    does not count what others do.

    Args:
        rows: are admitted, and released at the end; none had its id before.
        numbers: of the plans.
    """
    clock = time.process_time if mx.default_device() == mx.cpu else time.perf_counter

    def step(**parts: object) -> None:
        result = runner.step(StepPlan(next(numbers), **parts))  # type: ignore[arg-type]
        assert result is None or not (result.failed or result.lost)

    ids = tuple(new.row for new in rows)
    step(admit=tuple(rows), prefill=tuple(Span(new.row, 0, new.known, True) for new in rows))
    times: list[float] = []
    for _ in range(WARM_STEPS + steps):
        start = clock()
        step(decode=ids)
        times.append((clock() - start) * 1000)
    step(release=ids)
    return times[WARM_STEPS:]
