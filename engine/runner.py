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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import mlx.core as mx

from chairlift.cache.batch import RowBatch
from chairlift.cache.separate import SeparateRows
from chairlift.cache.step import DecodeStep
from chairlift.cache.views import SpanStep
from chairlift.engine.plan import NewRow, RunnerStats, Sample, Span, StepPlan, StepResult
from chairlift.engine.sampling import Draw, Drawn, row_key, sample
from chairlift.engine.sight import RowSight, Sight, SightError

log = logging.getLogger(__name__)

TIDY_STEPS = 256
"""Steps between returns of unused buffers to the system, as mlx-lm does it."""


FLAT_STEP = 32
"""On CUDA a step with prefill is padded to a multiple of this many tokens: every new number of tokens costs
milliseconds of planning."""


class Batching(StrEnum):
    """How a family's rows share a step."""

    FLAT = "flat"
    HYBRID = "hybrid"
    DENSE = "dense"
    ROWS = "rows"
    SOLO = "solo"


FLAT_STEPS = (Batching.FLAT, Batching.ROWS)
"""Decode rows and prefill chunks in one forward over `[tokens, 1]`."""


def make_batch(batching: Batching, template: Sequence[Any]) -> RowBatch | SeparateRows:
    """An empty batch of rows with caches such as `template`.

    Raises:
        ValueError: caches that cannot share a batch this way.
    """
    if batching is Batching.SOLO:
        return RowBatch([])
    if batching is Batching.ROWS:
        return SeparateRows(template)
    return RowBatch(template, dense=batching is Batching.DENSE)


@dataclass(slots=True)
class _Row:
    """One row on the device."""

    spec: NewRow
    key: tuple[int, int]
    drawn: int
    caches: list[Any] | None
    """The row's own caches while it prefills (in solo, always); None once it is in the batch."""
    held: int = 0
    """Tokens that the state holds."""
    held_back: tuple[int, ...] = ()
    """Prompt tokens still to come with the last chunk, where a model needs its prompt in one piece."""
    pending: mx.array | None = None
    """int32 scalar, not yet in the batch's `pending`: the last token drawn, or a prompt's last token."""
    sight: RowSight | None = None
    """Its images, from when they are first needed."""

    @property
    def delta(self) -> int:
        """Rotary position less index of the tokens behind its prompt."""
        return self.sight.delta if self.sight is not None else 0

    def draw(self) -> Draw:
        return Draw(self.spec.sampling, self.key, self.drawn)


@dataclass(slots=True)
class _Flight:
    """A step on the device whose tokens the host has not read yet."""

    number: int
    rows: tuple[int, ...] = ()
    drawing: list[int] = field(default_factory=list)
    wanted: dict[int, int | None] = field(default_factory=dict)
    drawn: Drawn | None = None
    arrays: list[mx.array] = field(default_factory=list)
    encoded: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def outputs(self) -> list[mx.array]:
        return [*(self.drawn.arrays if self.drawn is not None else ()), *self.arrays]


Forward = Callable[..., mx.array]


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
    """

    def __init__(
        self,
        forward: Forward,
        make_cache: Callable[[], list[Any]],
        batching: Batching,
        *,
        split: tuple[Callable[..., mx.array], Callable[[mx.array], mx.array]] | None = None,
        whole_prompts: bool = False,
        sight: Sight | None = None,
    ) -> None:
        self.batching = batching
        self._forward = forward
        self._make_cache = make_cache
        self._split = split
        self._whole_prompts = whole_prompts
        self._sight = sight
        self._rows: dict[int, _Row] = {}
        self._batch = self._fresh_batch()
        self._pending: mx.array | None = None
        self._last: _Flight | None = None
        self._steps = 0

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch `plan`; the result of the plan launched before. See `chairlift.engine.plan.Runner`."""
        flight = self._launch(plan)
        if self._last is None:
            landed = None
        else:
            landed, fault = self._land(self._last)
            if fault is not None and flight is not None:
                # The new step was built on arrays of the failed one.
                self._lose(flight, fault)
        self._last = flight
        self._tidy(idle=flight is None)
        return landed

    def stats(self) -> RunnerStats:
        own = [row.caches for row in self._rows.values() if row.caches is not None]
        own_bytes = sum(_nbytes(caches) for caches in own)
        return RunnerStats(
            rows=len(self._rows),
            kv_bytes=self._batch.nbytes + own_bytes,
            kv_tokens_bytes=self._batch.held_nbytes + own_bytes,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
        )

    def close(self) -> None:
        self._last = None
        self._rows.clear()
        self._make_cache = list
        self._reset_batch()
        self._forward = _closed
        self._split = self._sight = None
        mx.clear_cache()

    # Launching

    def _launch(self, plan: StepPlan) -> _Flight | None:
        for row in plan.release:
            self._rows.pop(row, None)
        for new in plan.admit:
            self._rows[new.row] = _Row(new, row_key(new.seed), new.drawn, self._make_cache())
        if plan.idle:
            self._gather([])
            return None
        flight = _Flight(plan.number, plan.rows)
        self._launch_tokens(plan, flight)
        for row in plan.encode:
            if self._present(row, flight):
                self._encode(row, flight)
        return flight

    def _launch_tokens(self, plan: StepPlan, flight: _Flight) -> None:
        decode = [row for row in plan.decode if self._present(row, flight)]
        spans = [span for span in plan.prefill if self._present(span.row, flight)]
        if not decode and not spans:
            self._gather([])
            return
        try:
            if self.batching in FLAT_STEPS:
                self._launch_flat(flight, decode, spans)
            else:
                self._launch_apart(flight, decode, spans)
            mx.async_eval(*flight.outputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            # Half the layers may hold the step's tokens: nothing that took part can be used again.
            log.exception("step %d could not be built", plan.number)
            self._fail_step(flight, decode, spans, error)

    def _present(self, row: int, flight: _Flight) -> bool:
        if row in self._rows:
            return True
        flight.lost[row] = "The row's state is gone."
        return False

    def _launch_flat(self, flight: _Flight, decode: Sequence[int], spans: Sequence[Span]) -> None:
        """Decode rows and the chunks of text in one forward. A row with images prefills by itself: its tokens
        go in as embeddings, and with positions of their own."""
        seeing = [span for span in spans if self._rows[span.row].spec.media is not None]
        spans = [span for span in spans if span not in seeing]
        alone, logits_alone, ready = self._prefill_each(flight, seeing)
        self._gather([*decode, *ready])
        if not self._batch.order and not spans:
            self._sample(flight, alone, mx.concatenate(logits_alone) if alone else mx.array([]))
            return
        step = self._begin() if self._batch.order else None
        steps, start = [], len(self._batch.order)
        for span in spans:
            steps.append(SpanStep(start, start + len(span.tokens), span.start))
            start += len(span.tokens)
        padding = -start % FLAT_STEP if spans and mx.cuda.is_available() else 0
        positions = list(step.lengths) if step is not None else []
        tokens: list[int] = []
        for span in spans:
            positions += range(span.start, span.start + len(span.tokens))
            tokens += span.tokens
        positions += [0] * padding
        tokens += [0] * padding
        parts = [self._pending] if self._pending is not None and step is not None else []
        parts += [mx.array(tokens, dtype=mx.int32)] if tokens else []
        inputs = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        own = [(at, self._own(span.row)) for at, span in zip(steps, spans, strict=True)]
        caches = self._batch.caches(step, mx.array(positions, dtype=mx.int32), own, padding)
        told = self._deltas(len(positions))
        ending = [(span.row, at.stop - 1) for at, span in zip(steps, spans, strict=True) if span.last]
        wanted = [*range(len(self._batch.order)), *(index for _, index in ending)]
        logits = self._logits(inputs[:, None], caches, wanted, told)
        self._after_decode()
        for span in spans:
            self._rows[span.row].held = span.start + len(span.tokens)
            flight.arrays += _state(self._own(span.row))
        if alone:
            logits = mx.concatenate([logits, *logits_alone])
        self._sample(flight, [*self._batch.order, *(row for row, _ in ending), *alone], logits)

    def _logits(
        self, inputs: mx.array, caches: list[Any], wanted: Sequence[int], told: dict[str, mx.array]
    ) -> mx.array:
        """Logits `[len(wanted), vocab]` of the wanted tokens of a flat step `[tokens, 1]`."""
        everything = list(wanted) == list(range(inputs.shape[0]))
        if self._split is None:
            logits = self._forward(inputs, caches, **told)[:, -1]
            return logits if everything else logits[mx.array(list(wanted), dtype=mx.int32)]
        body, head = self._split
        hidden = body(inputs, cache=caches, **told)
        if not everything:
            hidden = hidden[mx.array(list(wanted), dtype=mx.int32)]
        return head(hidden)[:, -1]

    def _launch_apart(self, flight: _Flight, decode: Sequence[int], spans: Sequence[Span]) -> None:
        """Chunks one request at a time, then all decoding rows, those whose prompt ends now included."""
        drawing, logits, ready = self._prefill_each(flight, spans)
        ready = [*decode, *ready]
        if self.batching is Batching.SOLO:
            for row in ready:
                try:
                    logits.append(self._decode_alone(row, flight))
                    drawing.append(row)
                except Exception as error:
                    self._fail_row(flight, row, error)
        else:
            try:
                logits += self._decode_together(ready)
                drawing += self._batch.order
            except Exception as error:
                # Rows that prefill have caches of their own and go on.
                log.exception("decode of step %d could not be built", flight.number)
                self._drop(ready)
                flight.lost.update(dict.fromkeys(ready, _blame(error)))
        if drawing:
            joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
            self._sample(flight, drawing, joined)

    def _prefill_each(
        self, flight: _Flight, spans: Sequence[Span]
    ) -> tuple[list[int], list[mx.array], list[int]]:
        """Chunks one request at a time: (rows that draw, their logits, rows ready to decode)."""
        drawing: list[int] = []
        logits: list[mx.array] = []
        ready: list[int] = []
        for span in spans:
            try:
                first = self._prefill(span)
            except Exception as error:
                self._fail_row(flight, span.row, error)
                continue
            flight.arrays += _state(self._own(span.row))
            if first is not None:
                drawing.append(span.row)
                logits.append(first)
            elif span.last:
                ready.append(span.row)
        return drawing, logits, ready

    def _prefill(self, span: Span) -> mx.array | None:
        """Prefill a chunk on the row's own caches. The last known token is left to the decode pass, so that
        no logits are computed here; but a state that holds nothing yet takes it, and so does one whose last
        token belongs to the rest (an image, a prompt in one piece): its logits `[1, vocab]` are returned."""
        row = self._rows[span.row]
        sight = self._look(row)
        while sight is not None and not sight.encoded:
            sight.encode()
        tokens = row.held_back + span.tokens
        whole = self._whole_prompts or (sight is not None and sight.whole)
        if whole and not span.last:
            row.held_back = tokens
            return None
        row.held_back = ()
        end = span.start + len(span.tokens)
        bound = (whole and not row.spec.drawn) or (sight is not None and sight.bound(end - 1))
        left = span.last and end > 1 and not bound
        if left:
            row.pending = mx.array(tokens[-1], dtype=mx.int32)
            tokens = tokens[:-1]
        # What a row of whole prompts drew before it was preempted was fed token by token.
        first = end - row.spec.drawn if whole else len(tokens)
        pieces = [tokens[:first], *((token,) for token in tokens[first:])]
        logits = None
        for piece in pieces:
            if piece:
                told = sight.told(row.held, piece) if sight is not None else {}
                inputs = mx.array(piece, dtype=mx.int32)[None]
                logits = self._forward(inputs, self._own(span.row), **told)[:, -1]
                row.held += len(piece)
        return logits if span.last and not left else None

    def _decode_together(self, ready: Sequence[int]) -> list[mx.array]:
        """Logits `[rows, vocab]` after one token of each of the rows, which are the batch from now on."""
        self._gather(ready)
        if not self._batch.order:
            return []
        step = self._begin()
        assert self._pending is not None
        caches = self._batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
        logits = self._forward(self._pending[:, None], caches, **self._deltas(len(self._batch.order)))[:, -1]
        self._after_decode()
        return [logits]

    def _decode_alone(self, row_id: int, flight: _Flight) -> mx.array:
        row = self._rows[row_id]
        assert row.pending is not None
        caches = self._own(row_id)
        told = {"deltas": mx.array([row.delta], dtype=mx.int32)} if row.delta else {}
        logits = self._forward(row.pending.reshape(1, 1), caches, **told)[:, -1]
        row.held += 1
        flight.arrays += _state(caches)
        return logits

    def _look(self, row: _Row) -> RowSight | None:
        """The row's images, or None."""
        if row.spec.media is not None and row.sight is None:
            if self._sight is None:
                raise SightError("This model takes no images.")
            row.sight = self._sight.row(row.spec.prompt, row.spec.media)
        return row.sight

    def _encode(self, row: int, flight: _Flight) -> None:
        """One more of the row's images, behind the step's tokens on the device."""
        try:
            sight = self._look(self._rows[row])
            if sight is not None:
                sight.encode()
            if sight is None or sight.encoded:
                flight.encoded.add(row)
        except Exception as error:
            self._fail_row(flight, row, error)

    def _deltas(self, tokens: int) -> dict[str, mx.array]:
        """What a step of `tokens` tokens, the batch's rows first, is told of their images' positions."""
        deltas = [self._rows[row].delta for row in self._batch.order]
        if not any(deltas):
            return {}
        return {"deltas": mx.array(deltas + [0] * (tokens - len(deltas)), dtype=mx.int32)}

    def _own(self, row: int) -> list[Any]:
        caches = self._rows[row].caches
        if caches is None:
            raise RuntimeError(f"Row {row} is in the batch and prefills no more.")
        return caches

    def _gather(self, decode: Sequence[int]) -> None:
        """Make the batch hold exactly the rows of `decode`, and `_pending` their tokens in batch order.

        A row of the batch that is not to decode has launched its last draw: its state goes."""
        old = self._batch.order
        # A row that has caches of its own is new, though one of its name may still be in the batch.
        joining = [row for row in decode if self._rows[row].caches is not None]
        staying = set(decode).difference(joining)
        leaving = [row for row in old if row not in staying]
        if not joining and not leaving:
            return
        states = [self._rows[row] for row in joining]
        self._batch.change(
            leave=leaving,
            join={row: (self._own(row), state.held) for row, state in zip(joining, states, strict=True)},
        )
        for row in leaving:
            if row in self._rows and self._rows[row].caches is None:
                del self._rows[row]
        place = {row: index for index, row in enumerate([*old, *joining])}
        parts = [self._pending] if self._pending is not None else []
        for state in states:
            assert state.pending is not None
            parts.append(state.pending.reshape(1))
            state.caches = state.pending = None
        wanted = [place[row] for row in self._batch.order]
        if not wanted:
            self._pending = None
            return
        everything = mx.concatenate(parts)
        unchanged = wanted == list(range(len(place)))
        self._pending = everything if unchanged else everything[mx.array(list(wanted), dtype=mx.int32)]

    def _begin(self) -> DecodeStep:
        """Room for a token of every row. A row that outgrows its cohort changes the batch order: `_pending`
        follows."""
        before = {row: at for at, row in enumerate(self._batch.order)}
        step = self._batch.begin()
        wanted = [before[row] for row in self._batch.order]
        if wanted != list(range(len(wanted))) and self._pending is not None:
            self._pending = self._pending[mx.array(wanted, dtype=mx.int32)]
        return step

    def _after_decode(self) -> None:
        self._batch.end()
        for row in self._batch.order:
            self._rows[row].held += 1

    def _sample(self, flight: _Flight, rows: list[int], logits: mx.array) -> None:
        """Draw for `rows`; the batch's own rows keep their tokens in `_pending`, in batch order."""
        if not rows:
            return
        drawn = sample(logits, [self._rows[row].draw() for row in rows])
        index = {row: at for at, row in enumerate(rows)}
        for row, at in index.items():
            state = self._rows[row]
            flight.wanted[row] = state.spec.sampling.logprobs
            state.drawn += 1
            if state.caches is not None:
                state.pending = drawn.tokens[at]
        order = self._batch.order
        if order:
            first = index[order[0]]
            self._pending = drawn.tokens[first : first + len(order)]
        flight.drawing = rows
        flight.drawn = drawn

    # Landing

    def _land(self, flight: _Flight) -> tuple[StepResult, str | None]:
        """The step's result, and one line if its computation failed."""
        fault = None
        try:
            mx.eval(flight.outputs)
        except Exception as error:
            log.exception("step %d failed", flight.number)
            fault = _blame(error)
            self._lose(flight, fault)
        samples = self._read(flight, flight.drawn) if flight.drawn is not None else {}
        encoded = frozenset(flight.encoded)
        return StepResult(flight.number, samples, flight.failed, flight.lost, encoded), fault

    def _read(self, flight: _Flight, drawn: Drawn) -> dict[int, Sample]:
        tokens: Any = drawn.tokens.tolist()
        valid: Any = drawn.valid.tolist()
        logprobs: Any = drawn.logprobs.tolist() if drawn.logprobs is not None else None
        tops: Any = drawn.top_tokens.tolist() if drawn.top_tokens is not None else None
        top_logprobs: Any = drawn.top_logprobs.tolist() if drawn.top_logprobs is not None else None
        samples = {}
        for at, row in enumerate(flight.drawing):
            if not valid[at]:
                self._rows.pop(row, None)
                flight.failed[row] = "The model's output is not a number for this request."
                continue
            wanted = flight.wanted[row]
            if wanted is None:
                samples[row] = Sample(tokens[at])
                continue
            pairs = zip(tops[at][:wanted], top_logprobs[at][:wanted], strict=True) if wanted else ()
            samples[row] = Sample(tokens[at], logprobs[at], tuple(pairs))
        return samples

    # Faults

    def _fail_row(self, flight: _Flight, row: int, error: Exception) -> None:
        """A row whose own forward could not be built; no other took part in it."""
        log.error("row %d failed in step %d", row, flight.number, exc_info=error)
        self._rows.pop(row, None)
        flight.failed[row] = _blame(error)

    def _fail_step(
        self, flight: _Flight, decode: Sequence[int], spans: Sequence[Span], error: Exception
    ) -> None:
        """A step that could not be built: prefilling rows are at fault, all others are lost."""
        message = _blame(error)
        flight.drawn, flight.drawing, flight.arrays = None, [], []
        self._drop([*decode, *(span.row for span in spans)])
        flight.failed.update({span.row: message for span in spans})
        flight.lost.update(dict.fromkeys(decode, message))

    def _lose(self, flight: _Flight, message: str) -> None:
        """A step whose computation failed: its rows' state is gone."""
        self._drop(flight.rows)
        flight.lost.update({row: message for row in flight.rows if row not in flight.failed})
        flight.drawn, flight.drawing, flight.arrays = None, [], []

    def _drop(self, rows: Sequence[int]) -> None:
        """Forget these rows and all that is in the batch."""
        for row in rows:
            self._rows.pop(row, None)
        self._reset_batch()

    def _reset_batch(self) -> None:
        for row in self._batch.order:
            self._rows.pop(row, None)
        self._batch = self._fresh_batch()
        self._pending = None

    def _fresh_batch(self) -> RowBatch | SeparateRows:
        return make_batch(self.batching, self._make_cache())

    def _tidy(self, *, idle: bool) -> None:
        self._steps += 1
        if idle or self._steps % TIDY_STEPS == 0:
            mx.clear_cache()


def _state(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of a row's caches, to evaluate."""
    return [array for cache in caches for array in _arrays(cache.state)]


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _arrays(part)


def _nbytes(caches: Sequence[Any]) -> int:
    return sum(array.nbytes for array in _state(caches))


def _blame(error: Exception) -> str:
    """One line for the client; the log holds the rest."""
    if isinstance(error, SightError):
        return str(error)
    return f"The model step failed ({type(error).__name__})."


def _closed(tokens: mx.array, caches: list[Any]) -> mx.array:
    raise RuntimeError("The runner is closed.")
