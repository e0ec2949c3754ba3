"""How many bytes a model's rows take, found from caches that hold a few tokens. Runs on the MLX thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from chairlift.cache.attention import CohortKV
from chairlift.cache.batch import RecurrentLayer, RowBatch, UnsupportedCache, paired, storage_of
from chairlift.cache.layout import FLOOR
from chairlift.engine.batching import Batching, make_batch
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.plan import NewRow, Span, StepPlan
from chairlift.engine.request import SamplingParams
from chairlift.engine.runner import MlxRunner

HELD = 3
"""Tokens of the trial."""
FEW = 256
"""Tokens, and twice as many, of a trial of caches of a kind of their own: longer than most windows."""
_TRIED = 64
"""Tokens of the step that is tried on a CPU, where one of many takes long."""
_COUNTS = 2 * 4
"""Bytes of a row and token of the vocabulary where tokens are counted, of the prompt and of the answer."""


def measure_states(
    model: nn.Module,
    vocab_size: int,
    make_cache: Callable[[], list[Any]],
    batching: Batching,
    image_bytes: int,
) -> StateSizes:
    """Sizes of the states of a model's rows.

    Args:
        image_bytes: of an image's token, encoded.
    """

    def filled(tokens: int) -> list[Any]:
        caches = make_cache()
        mx.eval(model(mx.array([[31 * at % vocab_size for at in range(tokens)]]), cache=caches))
        return caches

    shared = batching not in (Batching.SOLO, Batching.ROWS)
    tokens, windows, row = layer_bytes(filled)
    batch = make_batch(batching, make_cache()) if shared else None
    return StateSizes(
        token_bytes=tokens,
        windows=tuple(sorted(windows.items())),
        row_bytes=row,
        shared=shared,
        early=batching is not Batching.FLAT,
        single=batching is Batching.DENSE,
        floor=batch.layout.floor if isinstance(batch, RowBatch) else FLOOR,
        image_bytes=image_bytes,
        counting_bytes=_COUNTS * vocab_size,
    )


def measure_step(runner: MlxRunner, vocab_size: int, tokens: int) -> int:
    """Bytes that a step of so many prompt tokens takes beside weights and the row's state."""
    tried = min(tokens, _TRIED) if mx.default_device() == mx.cpu else tokens
    prompt = tuple(31 * at % vocab_size for at in range(tried))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    new = NewRow(-1, SamplingParams(temperature=0), seed=0)
    runner.step(StepPlan(-3, admit=(new,), prefill=(Span(-1, 0, prompt, last=True),)))
    runner.step(StepPlan(-2))
    peak, held = mx.get_peak_memory(), mx.get_active_memory()
    runner.step(StepPlan(-1, release=(-1,)))
    return max(0, peak - max(before, held)) * tokens // tried


def layer_bytes(filled: Callable[[int], Sequence[Any]]) -> tuple[int, dict[int, int], int]:
    """Bytes of a token in layers that keep all, of a token by window, and of a row's states.

    Args:
        filled: a row's caches that hold so many tokens.
    """
    tokens, windows, row = 0, dict[int, int](), 0
    unknown: list[int] = []
    for place, cache in enumerate(filled(HELD)):
        try:
            tree = storage_of(cache)
        except UnsupportedCache:
            unknown.append(place)
            continue
        for layer, own in paired([tree], [cache], CohortKV | RecurrentLayer):
            if isinstance(layer, RecurrentLayer):
                row += sum(array.nbytes for array in own.cache if array is not None)
                continue
            assert isinstance(layer, CohortKV)
            size = sum(plane.nbytes // plane.shape[2] for plane in layer.planes_of(own)) if own.offset else 0
            if layer.window is None:
                tokens += size
            else:
                windows[layer.window] = windows.get(layer.window, 0) + size
    if unknown:  # their arrays tell: what grows with the tokens, and what is there beside it
        less, more = (_nbytes(filled(held), unknown) for held in (FEW, 2 * FEW))
        each = -(-max(0, more - less) // FEW)
        tokens, row = tokens + each, row + max(0, more - 2 * FEW * each)
    return tokens, windows, row


def _nbytes(caches: Sequence[Any], places: Sequence[int]) -> int:
    return sum(array.nbytes for array in _arrays(caches[place] for place in places))


def _arrays(caches: Iterable[Any]) -> list[mx.array]:
    found = tree_flatten([getattr(cache, "state", None) for cache in caches])
    return [array for _, array in found if isinstance(array, mx.array)]
