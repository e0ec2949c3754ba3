"""The runner: carries out step plans on the one MLX thread, one step of look-ahead.

A row's prompt is prefilled chunk by chunk on caches of its own, as the model's `make_cache` gives them, so
padding exists nowhere. When its last known token is due, the row joins the `RowBatch` and from then on
takes one token per step with all the others. How a step is computed depends on the family (`Batching`):

- flat: one forward over `[tokens, 1]`, decode rows and prefill chunks together; attention per cohort and
  span. For families all of whose layers are attention.
- hybrid: chunks one request at a time, then one forward over `[rows, 1]`. Recurrent layers need the
  sequence axis.
- dense: as hybrid, attention rows in one padded block, for families that do arithmetic on keys and are not
  known to `chairlift.patches.parts`.
- rows: as flat, but every row keeps its own caches and attention runs row by row.
- solo: every row by itself on its own caches. Slow and never wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from chairlift.cache.room import make_room
from chairlift.cache.step import DecodeStep
from chairlift.engine.batching import FLAT_STEPS, Batching
from chairlift.engine.blas import StepThreads
from chairlift.engine.chunks import Chunks, Forward, closed
from chairlift.engine.compiled import CompiledSteps
from chairlift.engine.draws import Draws
from chairlift.engine.faults import Faults
from chairlift.engine.flat import FlatStep, Split, logits_of
from chairlift.engine.flight import Flight, blame
from chairlift.engine.pages import PageStore
from chairlift.engine.plan import NewRow, RunnerStats, Span, StepPlan, StepResult
from chairlift.engine.prefix.vocabulary import PageSink, PrefixSpec, Save
from chairlift.engine.residents import Resident, Residents, state_of
from chairlift.engine.sampling import Marks, row_key
from chairlift.engine.sight import Sight
from chairlift.engine.usage import Usage

log = logging.getLogger(__name__)

TIDY_STEPS = 256
"""Steps between returns of unused buffers to the system, as mlx-lm does it."""


class MlxRunner:
    """The `Runner` (chairlift.engine.plan) over a loaded model.

    Args:
        forward: tokens int32 `[batch, length]` and caches -> logits `[batch, length, vocab]`. With rows that
            have images also `deltas`, int32 `[batch]`, in a step of several rows, or what `RowSight.told`
            says of a span.
        make_cache: fresh caches for one request, one per layer.
        batching: how the family shares a step.
        split: (body, head) with `forward == head(body(...))`: lets a flat step compute logits only for the
            tokens that draw. None computes them for all.
        whole_prompts: hold a prompt's chunks back until the last and prefill them in one piece.
        sight: encodes images; None for a model that takes none.
        marks: tokens that sampling treats apart.
        pages: what is kept of rows for later ones; None where nothing can be.
        weights: arrays of the model, to be counted.
        threads: what steps take of the processor; None leaves that alone.
        compiled: decode steps of a flat family; None compiles none.
    """

    def __init__(
        self,
        forward: Forward,
        make_cache: Callable[[], list[Any]],
        batching: Batching,
        *,
        split: Split | None = None,
        whole_prompts: bool = False,
        sight: Sight | None = None,
        marks: Marks | None = None,
        pages: PageStore | None = None,
        weights: int = 0,
        threads: StepThreads | None = None,
        compiled: CompiledSteps | None = None,
    ) -> None:
        self.batching = batching
        self._forward = forward
        self._make_cache = make_cache
        self._split = split
        self._marks = marks or Marks()
        self._pages = pages if pages is not None else PageStore()
        self._residents = Residents(batching, make_cache)
        self._chunks = Chunks(self._residents, forward, whole_prompts=whole_prompts, sight=sight)
        self._draws = Draws(self._residents)
        self._faults = Faults(self._residents, self._pages)
        self._threads = threads
        self._compiled = compiled or CompiledSteps.off()
        self._last: Flight | None = None
        self._built: Callable[[], None] = lambda: None
        self._usage = Usage(weights)
        self._steps = 0

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch `plan`; the result of the plan launched before. See `chairlift.engine.plan.Runner`."""
        flight = self._launch(plan)
        landed, fault = self._land(self._last) if self._last is not None else (None, None)
        if self._threads is not None and not plan.idle:
            # Not before: until then the step before was running.
            self._threads.suit(plan)
        if flight is not None and fault is not None:
            # The new step was built on arrays of the failed one.
            self._faults.lose(flight, fault)
        if flight is not None and flight.undrawn is not None:
            self._draw_late(flight)
            self._encode(plan.encode, flight)
        self._last = flight
        self._tidy(idle=flight is None or plan.tidy)
        return landed

    @property
    def prefix(self) -> PrefixSpec | None:
        """What prefixes are kept as; None where they are not."""
        return self._pages.spec

    def when_built(self, call: Callable[[], None]) -> None:
        """See `chairlift.engine.plan.Runner`."""
        self._built = call

    def spill(self, sink: PageSink) -> None:
        """See `chairlift.engine.plan.Runner`."""
        self._pages.spill(sink)

    def stats(self) -> RunnerStats:
        return self._usage.read(self._residents, self._pages, self._compiled)

    def close(self) -> None:
        self._last = None
        self._make_cache = list
        self._residents.close()
        self._pages.clear()
        self._forward = closed
        self._split = None
        self._chunks.close()
        self._compiled.close()
        mx.clear_cache()
        if threading.current_thread() is not threading.main_thread():
            # The thread ends after this. A process that exits while a thread's streams are still being torn
            # down aborts now and then (mlx 0.32.4 on Linux: 'terminate called without an active exception').
            mx.synchronize()
            mx.clear_streams()

    # Launching

    def _launch(self, plan: StepPlan) -> Flight | None:
        flight = Flight(plan.number, plan.rows)
        if plan.settle:
            self._settle()
        self._keep(plan, flight)
        for row in plan.release:
            self._residents.rows.pop(row, None)
        self._pages.load(plan.load)
        for new in plan.admit:
            self._admit(new)
        if plan.idle:
            self._residents.gather([])
            return None
        self._launch_tokens(plan, flight)
        if flight.undrawn is None:
            self._encode(plan.encode, flight)
        return flight

    def _settle(self) -> None:
        """Wait for the step in flight: what it holds beside states is free then."""
        if self._last is not None:
            with suppress(Exception):  # which is said when it lands
                mx.eval(self._last.outputs)
        mx.clear_cache()

    def _keep(self, plan: StepPlan, flight: Flight) -> None:
        """Drop pages, then save those of rows that end. They are computed at once: what still refers to a
        batch's arrays keeps the step from writing into them in place."""
        self._pages.drop(plan.drop)
        saved = self._save(plan.keep, flight)
        if not saved:
            return
        try:
            if plan.idle:
                mx.eval(saved)
                self._pages.landed(plan.keep)
            else:
                mx.async_eval(*saved)  # type: ignore[no-untyped-call]
        except Exception:
            log.exception("pages of rows that end could not be computed")
            self._pages.spoil(*plan.keep)

    def _save(self, saves: Sequence[Save], flight: Flight) -> list[mx.array]:
        flight.saves += saves
        arrays = [array for save in saves for array in self._pages.save(save, self._residents)]
        flight.arrays += arrays
        return arrays

    def _admit(self, new: NewRow) -> None:
        """A row that cannot begin is not admitted, and so lost."""
        try:
            row = Resident(new, row_key(new.seed), new.drawn, None, marks=self._marks)
            if new.restore is None:
                row.caches = self._make_cache()
            else:
                row.caches, row.held = self._pages.restore(new.restore, new.room), new.restore.tokens
            if new.room:
                make_room(row.caches, new.room)
        except Exception:
            log.exception("row %d could not begin", new.row)
        else:
            self._residents.rows[new.row] = row

    def _launch_tokens(self, plan: StepPlan, flight: Flight) -> None:
        decode = [row for row in plan.decode if self._present(row, flight)]
        spans = [span for span in plan.prefill if self._present(span.row, flight)]
        if not decode and not spans:
            self._residents.gather([])
            return
        try:
            if self.batching in FLAT_STEPS:
                self._launch_flat(flight, decode, spans)
            else:
                self._launch_apart(flight, decode, spans)
            self._save(plan.save, flight)
            self._built()
            mx.async_eval(*flight.outputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            # Half the layers may hold the step's tokens: nothing that took part can be used again.
            log.exception("step %d could not be built", plan.number)
            flight.saves += plan.save
            self._faults.fail_step(flight, decode, spans, error)

    def _present(self, row: int, flight: Flight) -> bool:
        if row in self._residents.rows:
            return True
        flight.lost[row] = "The row's state is gone."
        return False

    def _launch_flat(self, flight: Flight, decode: Sequence[int], spans: Sequence[Span]) -> None:
        """Decode rows and the chunks of text in one forward. A row with images prefills by itself: its tokens
        go in as embeddings, and with positions of their own. So does one whose prompt is scored."""
        apart = [span for span in spans if self._residents.rows[span.row].prefills_apart]
        spans = [span for span in spans if span not in apart]
        alone, logits_alone, ready = self._prefill_each(flight, apart)
        self._gather([*decode, *ready], flight)
        if not self._residents.order and not spans:
            self._draws.launch(flight, alone, mx.concatenate(logits_alone) if alone else mx.array([]))
            return
        step = self._residents.begin() if self._residents.order else None
        flat = FlatStep.of(step.lengths if step is not None else (), spans)
        logits = self._flat_logits(step, flat, spans)
        self._residents.advance()
        for span in spans:
            self._residents.rows[span.row].held = span.start + len(span.tokens)
            flight.states[span.row] = state_of(self._residents.own(span.row))
        if alone:
            logits = mx.concatenate([logits, *logits_alone])
        self._draws.launch(flight, [*self._residents.order, *flat.ending, *alone], logits)

    def _flat_logits(self, step: DecodeStep | None, flat: FlatStep, spans: Sequence[Span]) -> mx.array:
        """Of the decode rows, then of the prompts that end."""
        told = self._residents.deltas(len(flat.positions))
        parts = [self._residents.pending] if self._residents.pending is not None and step is not None else []
        if step is not None and not spans and not told:
            logits = self._compiled.logits(self._residents.batch, step, parts[0])
            if logits is not None:
                return logits
        parts += [mx.array(flat.tokens, dtype=mx.int32)] if flat.tokens else []
        inputs = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        own = [(at, self._residents.own(span.row)) for at, span in zip(flat.spans, spans, strict=True)]
        caches = self._residents.batch.caches(
            step, mx.array(flat.positions, dtype=mx.int32), own, flat.padding
        )
        wanted = [*range(len(self._residents.order)), *flat.ending.values()]
        return logits_of(self._forward, self._split, inputs[:, None], caches, wanted, told)

    def _launch_apart(self, flight: Flight, decode: Sequence[int], spans: Sequence[Span]) -> None:
        """Chunks one request at a time, then all decoding rows, those whose prompt ends now included."""
        drawing, logits, ready = self._prefill_each(flight, spans)
        ready = [*decode, *ready]
        if self.batching is Batching.SOLO:
            for row in ready:
                try:
                    logits.append(self._chunks.decode(row))
                    flight.states[row] = state_of(self._residents.own(row))
                    drawing.append(row)
                except Exception as error:
                    self._faults.fail_row(flight, row, error)
        else:
            try:
                logits += self._decode_together(ready, flight)
                drawing += self._residents.order
            except Exception as error:
                # Rows that prefill have caches of their own and go on.
                log.exception("decode of step %d could not be built", flight.number)
                self._residents.drop(ready)
                flight.lost.update(dict.fromkeys(ready, blame(error)))
        if drawing:
            joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
            self._draws.launch(flight, drawing, joined)

    def _gather(self, rows: Sequence[int], flight: Flight) -> None:
        """Make the batch hold these. A row that joins may bring its arrays along: what else refers to them
        would have them copied when its next token is written."""
        for row in rows:
            for launched in (flight, self._last):
                if launched is not None and self._residents.rows[row].caches is not None:
                    launched.states.pop(row, None)
        self._residents.gather(rows)

    def _prefill_each(
        self, flight: Flight, spans: Sequence[Span]
    ) -> tuple[list[int], list[mx.array], list[int]]:
        """Chunks one request at a time: (rows that draw, their logits, rows ready to decode)."""
        drawing: list[int] = []
        logits: list[mx.array] = []
        ready: list[int] = []
        for span in spans:
            try:
                first = self._chunks.prefill(span)
            except Exception as error:
                self._faults.fail_row(flight, span.row, error)
                continue
            flight.states[span.row] = state_of(self._residents.own(span.row))
            flight.scored += self._residents.rows[span.row].take_scores(span.row)
            if first is not None:
                drawing.append(span.row)
                logits.append(first)
            elif span.last:
                ready.append(span.row)
        return drawing, logits, ready

    def _decode_together(self, ready: Sequence[int], flight: Flight) -> list[mx.array]:
        """Logits `[rows, vocab]` after one token of each of the rows, which are the batch from now on."""
        self._gather(ready, flight)
        if not self._residents.order:
            return []
        step = self._residents.begin()
        assert self._residents.pending is not None
        caches = self._residents.batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
        logits = self._forward(
            self._residents.pending[:, None], caches, **self._residents.deltas(len(self._residents.order))
        )[:, -1]
        self._residents.advance()
        return [logits]

    def _encode(self, rows: Sequence[int], flight: Flight) -> None:
        """One more of each row's images, behind the step's tokens on the device."""
        for row in rows:
            if not self._present(row, flight):
                continue
            try:
                sight = self._chunks.look(self._residents.rows[row])
                if sight is not None:
                    sight.encode()
                if sight is None or sight.encoded:
                    flight.encoded.add(row)
            except Exception as error:
                self._faults.fail_row(flight, row, error)

    def _draw_late(self, flight: Flight) -> None:
        """Draw for a step with constrained rows, after the step before has landed."""
        try:
            self._draws.finish(flight)
            mx.async_eval(*flight.outputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            log.exception("the draw of step %d could not be built", flight.number)
            self._faults.lose(flight, blame(error))

    # Landing

    def _land(self, flight: Flight) -> tuple[StepResult, str | None]:
        """The step's result, and one line if its computation failed."""
        fault = None
        known, samples = set(flight.failed), {}
        try:
            mx.eval(flight.outputs)
            samples = flight.read()
        except Exception as error:
            log.exception("step %d failed", flight.number)
            fault = blame(error)
            self._faults.lose(flight, fault)
        for row in flight.failed.keys() - known:
            self._faults.end_failed(flight, row)
        if fault is None:
            wrong = flight.failed.keys() | flight.lost.keys()
            self._pages.withhold(*(save for save in flight.saves if save.row in wrong))
            self._pages.landed(save for save in flight.saves if save.row not in wrong)
        spoiled = self._pages.take_spoiled()
        encoded, scored = frozenset(flight.encoded), flight.parts
        return StepResult(flight.number, samples, flight.failed, flight.lost, encoded, spoiled, scored), fault

    def _tidy(self, *, idle: bool) -> None:
        self._steps += 1
        if idle or self._steps % TIDY_STEPS == 0:
            mx.clear_cache()
