"""Decode steps compiled by `mx.compile`, whose graph the host builds in a fraction of the time.

A compiled step serves one `Shape`: slots and capacities by cohort, whoever sits in them. It computes free
slots, too, so where too many are free a step is computed as ever. Compiling costs as much as a few ordinary
steps, so a shape is compiled when it has been seen a number of times, and the shapes seen longest ago are
forgotten, with what was compiled for them. A batch that never repeats itself is so computed as ever.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from chairlift.cache.batch import RowBatch
from chairlift.cache.separate import SeparateRows
from chairlift.cache.step import DecodeStep
from chairlift.cache.traced import Decode, Shape, decode_function, run, shape_of, slots_of, stores_of
from chairlift.engine.chunks import Forward, closed

log = logging.getLogger(__name__)

AFTER = 10
"""Steps of a shape that are computed as ever before one is compiled: a compilation costs the host about as
much (16 ms) as ten compiled steps save it, and what came ten times is likely to come ten times more."""
FEW_SLOTS = 8
"""Free ones among so few are computed whatever their share: the weights are read all the same."""
MOST_SLOTS = 1.5
"""To each row, where there are more."""
MOST = 64
"""Shapes remembered, compiled or not."""


@dataclass(slots=True)
class _Seen:
    times: int = 0
    decode: Decode | None = None


class CompiledSteps:
    """Those of one model.

    Attributes:
        compilations: how often a step was compiled so far.
        computed: steps that were computed as compiled so far.

    Args:
        forward: tokens `[slots, 1]` and caches -> logits `[slots, 1, vocab]`.
        after: steps of a shape that are computed as ever before one is compiled.
        most: shapes remembered.
        compile: `mx.compile`, but for tests.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        after: int = AFTER,
        most: int = MOST,
        compile: Callable[[Decode], Decode] = mx.compile,
    ) -> None:
        self._forward = forward
        self._after = after
        self._most = most
        self._compile = compile
        self._seen: OrderedDict[Shape, _Seen] = OrderedDict()
        self._closed = False
        self.compilations = 0
        self.computed = 0

    @classmethod
    def off(cls) -> CompiledSteps:
        """None at all."""
        steps = cls(closed)
        steps.close()
        return steps

    @property
    def closed(self) -> bool:
        """No step will be compiled."""
        return self._closed

    def logits(self, batch: RowBatch | SeparateRows, step: DecodeStep, tokens: mx.array) -> mx.array | None:
        """Logits `[rows, vocab]` of a step of these tokens, int32 `[rows]`, all of them stored; or None, and
        nothing is changed: then the step is to be computed as ever. So are all, once one has failed."""
        try:
            return self.attempt(batch, step, tokens)
        except Exception as error:
            log.warning("decode steps are no longer compiled: %s: %s", type(error).__name__, error)
            self.close()
            return None

    def attempt(self, batch: RowBatch | SeparateRows, step: DecodeStep, tokens: mx.array) -> mx.array | None:
        """`logits`; where it raises, nothing is changed."""
        if self._closed or not isinstance(batch, RowBatch) or (stores := stores_of(batch)) is None:
            return None
        shape = shape_of(step)
        if slots_of(shape) > max(FEW_SLOTS, MOST_SLOTS * step.rows):
            return None
        seen = self._seen.setdefault(shape, _Seen())
        self._seen.move_to_end(shape)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        seen.times += 1
        if seen.times <= self._after:
            return None
        if seen.decode is None:
            seen.decode = self._compile(self._counted(decode_function(self._forward, stores, shape)))
        logits = run(seen.decode, stores, step, tokens)
        self.computed += logits is not None
        return logits

    def close(self) -> None:
        """Compile nothing any more, forget what was compiled and let the model go."""
        self._closed = True
        self._seen.clear()
        self._forward = closed

    def _counted(self, decode: Decode) -> Decode:
        def counted(
            tokens: mx.array, held: mx.array, planes: list[list[mx.array]]
        ) -> tuple[mx.array, list[list[mx.array]]]:
            self.compilations += 1
            return decode(tokens, held, planes)

        return counted
