"""Rows on the device: each on caches of its own while it prefills, then in the batch with all others.

All methods run on the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from chairlift.cache.attention import Planes
from chairlift.cache.batch import RowBatch
from chairlift.cache.pages import PageFormat
from chairlift.cache.separate import SeparateRows
from chairlift.cache.step import DecodeStep
from chairlift.engine.batching import Batching, make_batch
from chairlift.engine.constraints.matcher import Matcher
from chairlift.engine.plan import NewRow
from chairlift.engine.prompt_scores import PromptScores
from chairlift.engine.sampling import Draw, Marks, Shaping
from chairlift.engine.sight import RowSight
from chairlift.engine.thinking import ThinkingCount


@dataclass(slots=True)
class Resident:
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
    scores: list[PromptScores] = field(default_factory=list)
    """Of its prompt, not yet taken."""
    marks: Marks = Marks()
    shaping: Shaping | None = field(init=False)
    matcher: Matcher | None = field(init=False)
    """Its constraint, up to the last token that the host has seen."""
    thinking: ThinkingCount | None = field(init=False)
    """The same, of its thinking."""

    def __post_init__(self) -> None:
        self.shaping = self.marks.shaping(self.spec)
        constraint, budget = self.spec.constraint, self.spec.thinking
        self.matcher = constraint.compiled.matcher() if constraint is not None else None
        self.thinking = ThinkingCount(budget) if budget is not None else None
        for follower in (self.matcher, self.thinking):
            if follower is not None:
                for token in self.spec.known[len(self.spec.known) - self.spec.drawn :]:
                    follower.advance(token)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Where its settings read it."""
        return self.spec.known[: len(self.spec.known) - self.spec.drawn]

    @property
    def prefills_apart(self) -> bool:
        """Its chunks are not computed with those of others."""
        return self.spec.media is not None or self.spec.sampling.prompt_logprobs is not None

    def take_scores(self, row: int) -> list[tuple[int, PromptScores]]:
        """Those of its prompt that were computed since the last time, with its id."""
        taken, self.scores = [(row, part) for part in self.scores], []
        return taken

    @property
    def delta(self) -> int:
        """Rotary position less index of the tokens behind its prompt."""
        return self.sight.delta if self.sight is not None else 0

    def draw(self) -> Draw:
        return Draw(self.spec.sampling, self.key, self.drawn, self.shaping, self.marks.spared)


class Residents:
    """Every row with state, by id.

    Attributes:
        rows: all of them.
        batch: the model state of those that decode.
        pending: int32 `[rows of the batch]`, in batch order: the token each feeds next; None without rows.

    Args:
        batching: how the family shares a step.
        make_cache: fresh caches for one request, one per layer.
    """

    def __init__(self, batching: Batching, make_cache: Callable[[], list[Any]]) -> None:
        self._batching = batching
        self._make_cache = make_cache
        self.rows: dict[int, Resident] = {}
        self.batch = self._fresh()
        self.pending: mx.array | None = None

    @property
    def order(self) -> list[int]:
        """The rows of the batch, in its order."""
        return self.batch.order

    @property
    def own_nbytes(self) -> int:
        """Bytes of the caches that rows have of their own."""
        own = [row.caches for row in self.rows.values() if row.caches is not None]
        return sum(array.nbytes for caches in own for array in state_of(caches))

    @property
    def buffers(self) -> int:
        """Arrays of all rows' states."""
        own = [caches for row in self.rows if (caches := self._caches_of(row)) is not None]
        shared = self.batch.buffers if isinstance(self.batch, RowBatch) else 0
        return shared + sum(len(state_of(caches)) for caches in own)

    def own(self, row: int) -> list[Any]:
        caches = self.rows[row].caches
        if caches is None:
            raise RuntimeError(f"Row {row} is in the batch and prefills no more.")
        return caches

    def planes(self, row: int, pages: PageFormat, start: int, stop: int) -> list[Planes]:
        """Views of a row's tokens [start, stop), by layer with pages."""
        if (caches := self._caches_of(row)) is not None:
            return pages.planes(caches, start, stop)
        assert isinstance(self.batch, RowBatch)
        return self.batch.planes(row, start, stop)

    def states(self, row: int, pages: PageFormat) -> list[Any]:
        """A row's caches of the layers with states."""
        if (caches := self._caches_of(row)) is not None:
            return pages.states(caches)
        assert isinstance(self.batch, RowBatch)
        return self.batch.states(row)

    def _caches_of(self, row: int) -> Sequence[Any] | None:
        """Those of its own, wherever they are; None for a row that shares the batch's."""
        own = self.rows[row].caches
        if own is None and isinstance(self.batch, SeparateRows):
            return self.batch.own(row)
        return own

    def gather(self, decode: Sequence[int]) -> None:
        """Make the batch hold exactly the rows of `decode`, and `pending` their tokens in batch order.

        A row of the batch that is not to decode has launched its last draw: its state goes."""
        old = self.batch.order
        # A row that has caches of its own is new, though one of its name may still be in the batch.
        joining = [row for row in decode if self.rows[row].caches is not None]
        staying = set(decode).difference(joining)
        leaving = [row for row in old if row not in staying]
        if not joining and not leaving:
            return
        states = [self.rows[row] for row in joining]
        self.batch.change(
            leave=leaving,
            join={row: (self.own(row), state.held) for row, state in zip(joining, states, strict=True)},
        )
        for row in leaving:
            if row in self.rows and self.rows[row].caches is None:
                del self.rows[row]
        place = {row: index for index, row in enumerate([*old, *joining])}
        parts = [self.pending] if self.pending is not None else []
        for state in states:
            assert state.pending is not None
            parts.append(state.pending.reshape(1))
            state.caches = state.pending = None
        wanted = [place[row] for row in self.batch.order]
        if not wanted:
            self.pending = None
            return
        everything = mx.concatenate(parts)
        unchanged = wanted == list(range(len(place)))
        self.pending = everything if unchanged else everything[mx.array(list(wanted), dtype=mx.int32)]

    def begin(self) -> DecodeStep:
        """Room for a token of every row. A row that outgrows its cohort changes the batch order: `pending`
        follows."""
        before = {row: at for at, row in enumerate(self.batch.order)}
        step = self.batch.begin()
        wanted = [before[row] for row in self.batch.order]
        if wanted != list(range(len(wanted))) and self.pending is not None:
            self.pending = self.pending[mx.array(wanted, dtype=mx.int32)]
        return step

    def advance(self) -> None:
        self.batch.end()
        for row in self.batch.order:
            self.rows[row].held += 1

    def deltas(self, tokens: int) -> dict[str, mx.array]:
        """What a step of `tokens` tokens, the batch's rows first, is told of their images' positions."""
        deltas = [self.rows[row].delta for row in self.batch.order]
        if not any(deltas):
            return {}
        return {"deltas": mx.array(deltas + [0] * (tokens - len(deltas)), dtype=mx.int32)}

    def drop(self, rows: Sequence[int]) -> None:
        """Forget these rows and all that is in the batch."""
        for row in rows:
            self.rows.pop(row, None)
        self.reset()

    def reset(self) -> None:
        for row in self.batch.order:
            self.rows.pop(row, None)
        self.batch = self._fresh()
        self.pending = None

    def close(self) -> None:
        """Forget every row, and the model's way to make caches."""
        self.rows.clear()
        self._make_cache = list
        self.reset()

    def _fresh(self) -> RowBatch | SeparateRows:
        return make_batch(self._batching, self._make_cache())


def state_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of a row's caches, to evaluate."""
    return [array for cache in caches for array in _arrays(cache.state)]


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _arrays(part)
