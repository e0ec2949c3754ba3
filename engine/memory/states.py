"""What rows' states take on the device: the runner's layout, followed without arrays. Pure.

The scheduler needs these numbers before the step that makes them true, so the same decisions are made here on
a `CohortLayout` of its own, plan by plan, as the runner makes them on its (`chairlift.engine.residents`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chairlift.cache.layout import FLOOR, STEP, CohortLayout, grown, most_room, round_up

OWN_STEP = 256
"""Tokens in which caches of rows that never share a block grow, from whatever they began with."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Of one model.

    Attributes:
        token_bytes: of a token in all layers that keep every token.
        windows: (tokens, bytes of a token) of the layers that keep a window.
        row_bytes: of the states of recurrent layers, one row's.
        shared: decoding rows share cohorts; else every row keeps caches of its own.
        early: a row joins its cohort in the step of its prompt's last chunk, without its last token; else in
            the step after, with it.
        single: all rows in one dense block.
        floor: of `CohortLayout`.
        chunk: tokens of a prompt's chunk at most: a row's own caches hold as many beside a window.
        image_bytes: of an image's token while the row's images are kept.
        counting_bytes: of a row whose sampling counts tokens.
    """

    token_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    row_bytes: int = 0
    shared: bool = True
    early: bool = False
    single: bool = False
    floor: int = FLOOR
    chunk: int = 0
    image_bytes: int = 0
    counting_bytes: int = 0

    def slots(self, slots: int, capacity: int) -> int:
        """Bytes of a cohort's block, recurrent states aside."""
        rings = sum(min(capacity, window) * size for window, size in self.windows)
        return slots * (capacity * self.token_bytes + rings)

    def room_for(self, tokens: int, *, early: bool = False) -> int:
        """Tokens that a row's own caches have room for while it prefills `tokens`: as many as the cohort it
        may come to have to itself (`chairlift.cache.room`)."""
        if not self.shared:
            return tokens + OWN_STEP
        return round_up(tokens if early and tokens > 1 else tokens + 1)

    def own(self, room: int) -> int:
        """Bytes of a row's own caches with room for so many tokens."""
        rings = sum(min(room, window + self.chunk) * size for window, size in self.windows)
        return room * self.token_bytes + rings

    def alone(self, prompt: int, total: int) -> int:
        """Most bytes of a row that nobody shares a step with, from its prompt until it holds `total` tokens,
        wherever between it has to start again."""
        capacity = self.room_for(total)
        if self.shared:
            first, last = self.room_for(prompt, early=self.early), round_up(total) - STEP
            # Started again shortly before its end, it grows once more.
            capacity = max(capacity, grown(last) if last >= first else 0)
            while first < total:
                first = grown(first)
            capacity = max(capacity, first)
        return max(self.slots(1, capacity), self.own(self.room_for(total))) + self.row_bytes

    def most_alone(self, prompt: int, room: int, most: int) -> int:
        """The largest total, of at most `most` tokens, for which `alone` is within `room` bytes; below
        `prompt` if there is none."""
        return _largest(prompt - 1, most, lambda total: self.alone(prompt, total) <= room)

    def longest(self, room: int, most: int) -> int:
        """Tokens of prompt and answer, of at most `most`, that a row alone can have in `room` bytes, wherever
        the one ends and the other begins. (One that is nearly all prompt may have more: it hardly grows.)"""
        # The answer's last token is not held. A short prompt grows the most, and so takes the most.
        return self.most_alone(1, room, most - 1) + 1


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number above `low` for which `holds`, which it does up to some; `low` if for none."""
    if low < high and holds(high):  # as almost always
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class Holding:
    """One row's state.

    Attributes:
        tokens: that it prefills in this admission.
        extra: bytes beside caches: images, counts.
        apart: its prompt is not computed with those of others, for its images or since it is scored.
    """

    tokens: int
    extra: int = 0
    apart: bool = False


@dataclass(slots=True)
class RowStates:
    """All rows with states.

    Attributes:
        layout: the cohorts, as the runner has them once the last plan is launched.
        own: rows that have caches of their own.
        rows: every row.
    """

    sizes: StateSizes
    layout: CohortLayout = field(init=False)
    own: dict[int, Holding] = field(default_factory=dict)
    rows: dict[int, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = CohortLayout(single=self.sizes.single, floor=self.sizes.floor)

    def copy(self) -> RowStates:
        twin = RowStates(self.sizes, dict(self.own), dict(self.rows))
        twin.layout = self.layout.copy()
        return twin

    def parts(self) -> dict[tuple[str, int], int]:
        """Bytes, by cohort and by row."""
        sizes = self.sizes
        parts = {
            ("cohort", key): sizes.slots(len(cohort.slots), cohort.capacity)
            for key, cohort in self.layout.cohorts.items()
        }
        parts |= {("own", row): sizes.own(self.room_for(held)) for row, held in self.own.items()}
        parts |= {("row", row): held.extra + sizes.row_bytes for row, held in self.rows.items()}
        return parts

    @property
    def nbytes(self) -> int:
        sizes = self.sizes
        shared = sum(
            sizes.slots(len(cohort.slots), cohort.capacity) for cohort in self.layout.cohorts.values()
        )
        own = sum(sizes.own(self.room_for(held)) for held in self.own.values())
        return (
            shared + own + sum(held.extra for held in self.rows.values()) + len(self.rows) * sizes.row_bytes
        )

    def room_for(self, holding: Holding) -> int:
        """Tokens that a row's own caches have room for."""
        return self.sizes.room_for(holding.tokens, early=self._early(holding))

    def admit(self, row: int, holding: Holding) -> None:
        self.rows[row] = self.own[row] = holding

    def release(self, rows: Iterable[int]) -> None:
        """Their states go with the next plan, or are gone."""
        for row in rows:
            self.rows.pop(row, None)
            self.own.pop(row, None)

    def carry_out(
        self,
        admitted: Mapping[int, Holding],
        decode: Sequence[int],
        ending: Sequence[int],
        live: Collection[int],
    ) -> int:
        """A whole plan, as `step` does its forward; `live` are rows whose states do not go with it."""
        self.release([row for row in self.own if row not in live])
        for row, held in admitted.items():
            self.admit(row, held)
        twice = self.step(decode, ending)
        self.release([row for row in self.rows if row not in live])
        return twice

    def step(self, decode: Sequence[int], ending: Sequence[int] = ()) -> int:
        """Carry out a plan.

        Args:
            decode: rows that feed a token, in the plan's order.
            ending: rows whose prompt's last chunk is in it, in the plan's order.

        Returns:
            bytes of what is there twice meanwhile: rows that are copied into a cohort.
        """
        if not self.sizes.shared:
            for row in decode:
                if row in self.own:
                    self.own[row] = self.rows[row] = replace(self.own[row], tokens=self.own[row].tokens + 1)
            return 0
        decode = [row for row in decode if row in self.rows]
        staying = {row for row in decode if row not in self.own}
        for row in self.layout.rows:
            if row not in staying:
                self.layout.leave(row)
                self.rows.pop(row, None)
        joining = {row: self.own[row].tokens for row in decode if row in self.own}
        now = (row for row in ending if row in self.own and self._early(self.own[row]))
        joining |= {row: self._joins_with(self.own[row]) for row in now if self.own[row].tokens > 1}
        twice = self._join(joining)
        rows = self.layout.rows
        self.layout.make_room(rows)
        self.layout.advance(rows)
        return twice

    def joined(self) -> tuple[RowStates, int]:
        """The same, to look at, once every row that prefills has joined; and bytes of what is there twice
        then."""
        if not self.sizes.shared or not self.own:
            return self, 0
        twin = self.copy()
        joining = {row: self._joins_with(held) for row, held in self.own.items()}
        return twin, twin._join(joining)

    def quiet(self, decode: Sequence[int]) -> bool:
        """A step of these rows changes no cohort."""
        layout = self.layout
        return (
            self.sizes.shared
            and not self.own
            and layout.places.keys() == set(decode)
            and all(
                layout.lengths[row] < cohort.capacity
                for cohort in layout.cohorts.values()
                for row in cohort.rows
            )
        )

    def slack(self, tokens: Mapping[int, int]) -> int:
        """Bytes that rows would take beyond what they do if each held so many tokens more."""
        sizes, more = self.sizes, 0
        if not sizes.shared:
            for row, held in self.own.items():
                later = replace(held, tokens=held.tokens + tokens.get(row, 0))
                more += sizes.own(self.room_for(later)) - sizes.own(self.room_for(held))
        for cohort in self.layout.cohorts.values():
            slots = len(cohort.slots)
            longest = max(self.layout.lengths[row] + tokens.get(row, 0) for row in cohort.rows)
            capacity = max(cohort.capacity, round_up(longest + 1))
            more += sizes.slots(slots, capacity) - sizes.slots(slots, cohort.capacity)
        return more

    def most(self, held: Holding, spare: int, length: int | None = None) -> int:
        """Bytes that a row accounts for at most, whatever cohort of several it is in or joins, with what is
        there twice when it joins, and room for `spare` tokens more. For rows that share cohorts.

        Args:
            length: tokens that it has now, of one that has joined.
        """
        sizes, length = self.sizes, held.tokens if length is None else length
        capacity = round_up(most_room(length, sizes.floor) + spare + 1)
        own = sizes.own(self.room_for(held))
        return 2 * (sizes.slots(1, capacity) + own) + held.extra + sizes.row_bytes

    def _early(self, holding: Holding) -> bool:
        return self.sizes.early or holding.apart

    def _joins_with(self, holding: Holding) -> int:
        """Tokens that a row holds when it joins: the last of an early one is to come."""
        return holding.tokens - 1 if self._early(holding) and holding.tokens > 1 else holding.tokens

    def _join(self, joining: Mapping[int, int]) -> int:
        """Rows join with so many tokens; bytes of those whose own caches do not become a cohort."""
        before = set(self.layout.cohorts)
        self.layout.join(joining.items())
        twice = 0
        for row in joining:
            room = self.room_for(self.own.pop(row))
            key = self.layout.places[row].cohort
            cohort = self.layout.cohorts[key]
            if key in before or len(cohort.slots) > 1 or cohort.capacity != room:
                twice += self.sizes.own(room)
        return twice
