"""Whether a CPU multiplies with few rows, as in a decode step, faster with weights laid out otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from chairlift.engine.blas import FEW_TOKENS

SAMPLE_BYTES = 2**27
"""Of weights that are tried: more than a CPU's caches hold."""
TRIES = 8
ROWS = (1, FEW_TOKENS // 2)


def pays(
    weights: Sequence[mx.array],
    arranged: Callable[[mx.array], mx.array],
    product: Callable[[mx.array, mx.array], mx.array],
    gain: float,
) -> bool:
    """Whether the products take less than `gain` of the usual ones' time, by the best of some tries in turns.

    Args:
        weights: `[outputs, inputs]`; the first ones are tried.
        arranged: a weight, laid out otherwise.
        product: `[rows, inputs]` by what `arranged` gives: `[rows, outputs]`.
    """
    sample, size = list[mx.array](), 0
    for weight in weights:
        if size < SAMPLE_BYTES:
            sample.append(weight)
            size += weight.nbytes
    if not sample:
        return False
    others = [arranged(weight) for weight in sample]
    inputs = [[mx.ones((rows, weight.shape[1])) for weight in sample] for rows in ROWS]
    mx.eval(others, inputs)
    usual, other = list[float](), list[float]()
    for _ in range(TRIES):
        usual.append(_seconds([x @ w.T for each in inputs for x, w in zip(each, sample, strict=True)]))
        other.append(_seconds([product(x, w) for each in inputs for x, w in zip(each, others, strict=True)]))
    return min(other) < gain * min(usual)


def _seconds(products: list[mx.array]) -> float:
    begin = time.perf_counter()
    mx.eval(products)
    return time.perf_counter() - begin
