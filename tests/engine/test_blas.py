"""Threads of matrix products by the size of a step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chairlift.engine.blas import FEW_TOKENS, Blas, StepThreads, fewest, measured
from chairlift.engine.plan import Span, StepPlan


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ({2: 1.0, 1: 1.08}, 1),
        ({2: 1.0, 1: 1.2}, 2),
        ({8: 1.0, 4: 1.1, 2: 1.9, 1: 3.7}, 4),
        ({2: 9.0, 1: 1.0}, 1),  # a core is taken by others
        ({1: 1.0}, 1),
    ],
)
def test_the_fewest_that_are_about_as_fast(times: dict[int, float], found: int) -> None:
    assert fewest(times) == found


def test_halves_are_measured_each_at_its_best_and_all_is_left() -> None:
    used: list[int] = []
    taken = {6: iter([5.0, 2.0, 2.0]), 3: iter([2.1, 9.0, 2.2]), 1: iter([4.0, 4.0, 4.0])}
    threads = measured(Blas(6, used.append), lambda: next(taken[used[-1]]))
    assert used == [6, 3, 1, 6]
    threads.suit(StepPlan(0, decode=(1,)))
    assert used[-1] == 3


def test_a_count_that_is_slower_is_the_last_that_is_tried() -> None:
    used: list[int] = []
    seconds = {8: 1.0, 4: 1.1, 2: 1.9}
    threads = measured(Blas(8, used.append), lambda: seconds[used[-1]])
    threads.suit(StepPlan(0, decode=(1,)))
    assert used == [8, 4, 2, 8, 4]


def test_all_are_left_where_the_measure_fails() -> None:
    used: list[int] = []
    with pytest.raises(KeyError):
        measured(Blas(4, used.append), lambda: {4: 1.0}[used[-1]])
    assert used == [4, 2, 4]


def test_decode_steps_of_few_rows_take_few() -> None:
    """A prompt's last chunk may bring along what was held back, and an image is many tokens at once."""
    used: list[int] = []
    threads = StepThreads(Blas(4, used.append), 1)
    for plan, wanted in (
        (StepPlan(0, decode=tuple(range(FEW_TOKENS))), 1),
        (StepPlan(1, decode=tuple(range(FEW_TOKENS + 1))), 4),
        (StepPlan(2, decode=(3,), prefill=(Span(4, 600, (5,), last=True),)), 4),
        (StepPlan(3, decode=(3,), encode=(4,)), 4),
        (StepPlan(4, encode=(4,)), 4),
    ):
        threads.suit(plan)
        assert used.pop() == wanted


def test_models_of_one_process_set_what_they_need() -> None:
    """The count is the process's, and not as this model left it."""
    used: list[int] = []
    ours, other = (StepThreads(Blas(4, used.append), few) for few in (1, 2))
    decoding = StepPlan(0, decode=(1,))
    for threads in (ours, other, ours):
        threads.suit(decoding)
    assert used == [1, 2, 1]


SCRIPT = """
import ctypes
from chairlift.engine.blas import find_blas
blas = find_blas()
blas.use(1)
print(blas.threads, ctypes.CDLL(None).openblas_get_num_threads(), find_blas().threads)
"""


@pytest.mark.skipif("openblas" not in os.environ.get("LD_PRELOAD", ""), reason="OpenBLAS is not preloaded")
def test_openblas_is_found_and_told() -> None:
    def run(threads: str) -> str:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        code = SCRIPT if threads != "1" else SCRIPT.replace("blas.use(1)", "print(blas); raise SystemExit")
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run("2") == "2 1 2"
    assert run("1") == "None"
