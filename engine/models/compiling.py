"""Finding out whether a model's decode steps may be compiled, by trying it on the model itself.

One batch takes a few steps as ever, another the same steps compiled; their logits must agree. A number that
got into the trace shows: rows are of unequal lengths, in two cohorts, one with a free slot, and tokens are
others every time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import RowBatch
from chairlift.engine.chunks import Forward
from chairlift.engine.compiled import CompiledSteps
from chairlift.engine.models.batching import TOLERANCE, distance, some_tokens

log = logging.getLogger(__name__)

_LENGTHS = (3, 9, 14, 70)
_LEAVES = 1
_FLOOR = 64
"""Of the cohorts: the longest row has one of its own."""
_STEPS = 3


def compiled_steps(
    forward: Forward, make_cache: Callable[[], list[Any]], vocab_size: int
) -> CompiledSteps | None:
    """For a flat model; None where compiled steps are not those that they should be.

    Args:
        forward, make_cache: as `MlxRunner` takes them.
    """
    trial = CompiledSteps(forward, after=0)
    try:
        objection = _objection(trial, forward, make_cache, vocab_size)
    except Exception as error:
        objection = f"{type(error).__name__}: {error}"
    finally:
        trial.close()
    if objection is not None:
        log.info("this model's decode steps are not compiled: %s", objection)
        return None
    return CompiledSteps(forward)


def _objection(
    trial: CompiledSteps, forward: Forward, make_cache: Callable[[], list[Any]], vocab_size: int
) -> str | None:
    ordinary, compiled = (RowBatch(make_cache(), floor=_FLOOR) for _ in range(2))
    rows = {}
    for row, length in enumerate(_LENGTHS):
        caches = make_cache()
        forward(some_tokens(row, length, vocab_size)[None], caches)
        rows[row] = (caches, length)
    for batch in (ordinary, compiled):
        batch.change(join=rows)
        batch.change(leave=[_LEAVES])
    worst = 0.0
    for number in range(_STEPS):
        tokens = some_tokens(10 + number, len(ordinary.order), vocab_size)
        step = ordinary.begin()
        caches = ordinary.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
        want = forward(tokens[:, None], caches)[:, -1]
        got = trial.attempt(compiled, compiled.begin(), tokens)
        if got is None:
            return "Not every layer is attention over keys and values as they are."
        for batch in (ordinary, compiled):
            batch.end()
        worst = max(worst, distance(got, want))
    if worst <= TOLERANCE.get(want.dtype, 1e-1):
        return None
    return f"Their logits differ by {worst:.1e} of the largest."
