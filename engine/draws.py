"""The draws of a step: launched with its forward, or later where constraints need the step before.

The mask of a constrained row's next token depends on its last one, which the host has to read first. So the
forward of step n + 1 is launched, step n lands, all masks are filled at once while the device computes, and
only then step n + 1 draws. A step without constrained rows knows nothing of this. A row whose thinking is
bounded is one of them from when it may have reached the bound until it thinks no more.

All methods run on the MLX thread.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from chairlift.engine.constraints.matcher import MaskFiller
from chairlift.engine.flight import Flight, Undrawn
from chairlift.engine.residents import Residents
from chairlift.engine.sampling import Mask, sample


class Draws:
    """Draws for the rows of `residents`."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._masks = MaskFiller()

    def launch(self, flight: Flight, rows: list[int], logits: mx.array) -> None:
        """Draw for `rows` from logits `[rows, vocab]`; if one is constrained, not before `finish`."""
        if not rows:
            return
        flight.drawing = rows
        states = [self._residents.rows[row] for row in rows]
        waits = False
        flight.undrawn = Undrawn(logits, [state.draw() for state in states])
        for row, state in zip(rows, states, strict=True):
            flight.wanted[row] = state.spec.sampling.logprobs
            if state.spec.restore is not None:
                flight.restored[row] = state.spec.restore
            if state.matcher is not None:
                flight.followed[row] = state.matcher
            if state.thinking is not None and not state.thinking.over:
                flight.thinking[row] = state.thinking
                waits = waits or state.thinking.waits(state.drawn)
            state.drawn += 1
        if not flight.followed and not waits:
            self._draw(flight, flight.undrawn, None)

    def finish(self, flight: Flight) -> None:
        """Draw after the step before has landed. Rows whose constraint gives up fail, by themselves."""
        assert flight.undrawn is not None
        ends = {row: count.forced for row, count in flight.thinking.items()}
        rows = [
            at for at, row in enumerate(flight.drawing) if row in flight.followed or ends.get(row) is not None
        ]
        mask = None
        if rows:
            matchers = [flight.followed.get(flight.drawing[at]) for at in rows]
            tokens = [ends.get(flight.drawing[at]) for at in rows]
            forced = {index: token for index, token in enumerate(tokens) if token is not None}
            bits = self._masks.fill(matchers, forced)
            mask = Mask(tuple(rows), mx.array(bits.view(np.uint32)))
        self._draw(flight, flight.undrawn, mask)
        for row, matcher in flight.followed.items():
            if matcher.fault is not None:
                self._residents.rows.pop(row, None)
                flight.failed[row] = matcher.fault

    def _draw(self, flight: Flight, undrawn: Undrawn, mask: Mask | None) -> None:
        """The batch's own rows keep their tokens in `pending`, in batch order."""
        flight.undrawn = None
        flight.drawn = drawn = sample(undrawn.logits, undrawn.draws, mask)
        index = {row: at for at, row in enumerate(flight.drawing)}
        for row, at in index.items():
            state = self._residents.rows.get(row)
            if state is not None and state.caches is not None:
                state.pending = drawn.tokens[at]
        order = self._residents.order
        if order:
            first = index[order[0]]
            self._residents.pending = drawn.tokens[first : first + len(order)]
