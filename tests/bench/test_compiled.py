"""bench/compiled.py: its tails against the engine's draws."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx

from chairlift.engine.sampling import Draw, row_key, sample
from tests.bench.scripts import script

compiled = script("compiled")


@pytest.mark.parametrize("index", range(3))
def test_a_tail_is_the_engines(index: int) -> None:
    case = compiled.CASES[index]
    draws = [Draw(case.sampling, row_key(row), row) for row in range(9)]
    logits = 4 * mx.random.normal((9, 1000), key=mx.random.key(index))
    tokens, valid = case.tail(logits, *case.arguments(9, draws))
    assert tokens.tolist() == sample(logits, draws).tokens.tolist()
    assert valid.tolist() == [True] * 9


def test_traces_are_counted() -> None:
    drawn = compiled.CASES[1]
    assert compiled.traces(drawn, 256, 5) == "5"
    assert compiled.traces(drawn, 256, 5, rounded=True) == "4"
    assert compiled.traces(drawn, 256, 5, shapeless=True) == "1"
