"""Which row sits in which cohort and slot: pure geometry, no arrays.

A **cohort** is a block of `slots`, each with room for `capacity` tokens; a row occupies one slot and fills
it from position 0. Rows of similar length share a cohort, so that memory stays near the sum of the lengths
and one attention call serves them all. Every attention layer of a model follows the same layout, so the
decisions are made once, here, and come out as actions that each layer's storage carries out in order.

Invariants, after the actions returned have been applied:
- every row has exactly one (cohort, slot), and no two rows share one;
- `length < capacity` for every row that was made room for (`make_room`), so the next token fits;
- a row that joins or leaves moves no row outside the cohort it joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

STEP = 64
"""Capacities are multiples of this many tokens."""
FLOOR = 256
"""Rows below this length share a cohort whatever their lengths: a launch costs more than the padding."""
MOST_GROWTH = 512
"""Tokens by which a full cohort grows at most at a time."""
RATIO = 2.0
"""Most that a cohort's capacity may exceed its shortest row (above FLOOR)."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Make cohort `key` a block of `slots` x `capacity`; new slot i holds what old slot `sources[i]` held.

    A key not seen before is a new cohort (`sources` empty)."""

    key: int
    sources: tuple[int, ...]
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `tokens` positions of one slot to another."""

    source: tuple[int, int]
    target: tuple[int, int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget cohort `key` and its memory."""

    key: int


Action = Rebuild | Move | Drop


@dataclass(slots=True)
class Cohort:
    key: int
    capacity: int = 0
    slots: list[int | None] = field(default_factory=list)
    """Row id by slot; None is a free slot."""

    @property
    def rows(self) -> list[int]:
        return [row for row in self.slots if row is not None]

    @property
    def free(self) -> int:
        return self.slots.count(None)


@dataclass(frozen=True, slots=True)
class Place:
    cohort: int
    slot: int


class CohortLayout:
    """Rows, their lengths and their places.

    Args:
        floor: tokens; rows below it share a cohort whatever their lengths.
        single: keep all rows in one cohort without holes, rows in slots 0..n-1: for model families that do
            arithmetic on whole keys and so need one dense block.
    """

    def __init__(self, *, single: bool = False, floor: int = FLOOR) -> None:
        self.single = single
        self.floor = floor
        self.cohorts: dict[int, Cohort] = {}
        self.places: dict[int, Place] = {}
        self.lengths: dict[int, int] = {}
        self._next_key = 0

    @property
    def rows(self) -> list[int]:
        """All rows, cohort by cohort in slot order: in this order each cohort is a slice of the batch."""
        return [row for cohort in self.cohorts.values() for row in cohort.rows]

    @property
    def allocated_tokens(self) -> int:
        return sum(len(c.slots) * c.capacity for c in self.cohorts.values())

    @property
    def held_tokens(self) -> int:
        return sum(self.lengths.values())

    def join(self, rows: Iterable[tuple[int, int]]) -> list[Action]:
        """Give each (row, length) a slot with room for at least one more token.

        Raises:
            ValueError: a row that is already here, or a negative length. Nothing has changed.
        """
        joining = sorted(rows, key=lambda pair: pair[1])
        seen = set(self.places)
        for row, length in joining:
            if row in seen:
                raise ValueError(f"Row {row} is already in the batch.")
            if length < 0:
                raise ValueError(f"Row {row} cannot hold {length} tokens.")
            seen.add(row)
        touched: dict[int, tuple[int, int]] = {}
        shortest: dict[int, int] = {}
        for row, length in joining:
            cohort = self._choose(length, shortest)
            touched.setdefault(cohort.key, (len(cohort.slots), cohort.capacity))
            self._seat(cohort, row, length)
            shortest[cohort.key] = min(length, shortest.get(cohort.key, length))
        return [action for key, before in touched.items() for action in self._grown(key, before)]

    def leave(self, row: int) -> list[Action]:
        """Free the row's slot. Nothing else moves, but a cohort half empty is packed.

        Raises:
            KeyError: no such row.
        """
        place = self.places.pop(row)
        del self.lengths[row]
        cohort = self.cohorts[place.cohort]
        cohort.slots[place.slot] = None
        if not cohort.rows:
            del self.cohorts[cohort.key]
            return [Drop(cohort.key)]
        actions = self._fill_hole(cohort, place.slot) if self.single else []
        if len(cohort.rows) * 2 <= len(cohort.slots):
            actions.append(self._pack(cohort))
        return actions

    def make_room(self, rows: Iterable[int]) -> list[Action]:
        """Before a step that appends one token to each of `rows`: room where a slot is full."""
        actions: list[Action] = []
        for row in rows:
            cohort = self.cohorts[self.places[row].cohort]
            if self.lengths[row] < cohort.capacity:
                continue
            if self.single or self._alike(cohort, self.lengths[row]):
                before = (len(cohort.slots), cohort.capacity)
                cohort.capacity = grown(cohort.capacity)
                actions += self._grown(cohort.key, before)
            else:
                actions += self._move(row)
        return actions

    def copy(self) -> CohortLayout:
        """The same, to try something on."""
        twin = CohortLayout(single=self.single, floor=self.floor)
        twin.cohorts = {
            key: Cohort(key, cohort.capacity, list(cohort.slots)) for key, cohort in self.cohorts.items()
        }
        twin.places, twin.lengths, twin._next_key = dict(self.places), dict(self.lengths), self._next_key
        return twin

    def advance(self, rows: Iterable[int]) -> None:
        """One token was appended to each of `rows`."""
        for row in rows:
            self.lengths[row] += 1

    def _choose(self, length: int, shortest: dict[int, int]) -> Cohort:
        """The cohort for a row of `length`: one with room, else one that may grow, else a new one.

        Args:
            shortest: length of each cohort's shortest row, as far as it is known; more is learnt here.
        """
        need = length + 1
        best: tuple[int, int, Cohort] | None = None
        for cohort in self.cohorts.values():
            capacity = max(cohort.capacity, round_up(need))
            if cohort.key not in shortest:
                shortest[cohort.key] = min((self.lengths[row] for row in cohort.rows), default=length)
            least = min(length, shortest[cohort.key]) + 1
            if not self.single and capacity > max(self.floor, RATIO * least):
                continue
            copies = capacity > cohort.capacity or not cohort.free
            rank = (int(copies), capacity - need)
            if best is None or rank < best[:2]:
                best = (*rank, cohort)
        if best is not None:
            return best[2]
        cohort = self.cohorts[self._next_key] = Cohort(self._next_key)
        self._next_key += 1
        return cohort

    def _seat(self, cohort: Cohort, row: int, length: int) -> None:
        cohort.capacity = max(cohort.capacity, round_up(length + 1))
        if None in cohort.slots:
            slot = cohort.slots.index(None)
            cohort.slots[slot] = row
        else:
            slot = len(cohort.slots)
            cohort.slots.append(row)
        self.places[row] = Place(cohort.key, slot)
        self.lengths[row] = length

    def _grown(self, key: int, before: tuple[int, int]) -> list[Action]:
        """One rebuild if the cohort is larger than `before`; spare slots so that joins copy rarely."""
        cohort = self.cohorts[key]
        slots, capacity = before
        if len(cohort.slots) > slots > 0:
            cohort.slots += [None] * max(0, slots + slots // 4 - len(cohort.slots))
        if (len(cohort.slots), cohort.capacity) == before:
            return []
        return [Rebuild(key, tuple(range(slots)), len(cohort.slots), cohort.capacity)]

    def _pack(self, cohort: Cohort) -> Rebuild:
        sources = tuple(slot for slot, row in enumerate(cohort.slots) if row is not None)
        cohort.slots = list(cohort.rows)
        for slot, row in enumerate(cohort.rows):
            self.places[row] = Place(cohort.key, slot)
        # Never larger: a row that is full here may have to move out.
        longest = max(self.lengths[row] for row in cohort.rows)
        cohort.capacity = min(cohort.capacity, round_up(longest + 1))
        return Rebuild(cohort.key, sources, len(cohort.slots), cohort.capacity)

    def _fill_hole(self, cohort: Cohort, hole: int) -> list[Action]:
        """Move the last row into the hole, so that a dense block's rows stay in slots 0..n-1."""
        last = len(cohort.rows)
        row = cohort.slots[last]
        if row is None:
            return []
        cohort.slots[hole], cohort.slots[last] = row, None
        self.places[row] = Place(cohort.key, hole)
        return [Move((cohort.key, last), (cohort.key, hole), self.lengths[row])]

    def _alike(self, cohort: Cohort, length: int) -> bool:
        """Whether growing the cohort for a row of `length` keeps its shortest row within RATIO."""
        shortest = min(self.lengths[row] for row in cohort.rows) + 1
        return round_up(length + 1) <= max(self.floor, RATIO * shortest)

    def _move(self, row: int) -> list[Action]:
        place, length = self.places[row], self.lengths[row]
        old = self.cohorts[place.cohort]
        old.slots[place.slot] = None
        del self.places[row]
        cohort = self._choose(length, {})
        before = (len(cohort.slots), cohort.capacity)
        self._seat(cohort, row, length)
        target = self.places[row]
        actions = self._grown(cohort.key, before)
        actions.append(Move((old.key, place.slot), (target.cohort, target.slot), length))
        if not old.rows:
            del self.cohorts[old.key]
            actions.append(Drop(old.key))
        elif len(old.rows) * 2 <= len(old.slots):
            actions.append(self._pack(old))
        return actions


def most_room(length: int, floor: int) -> int:
    """Most tokens that a cohort, not a single one, has room for where a row of this length is in it."""
    return grown(round_up(max(floor, int(RATIO * (length + 1)))))


def grown(capacity: int) -> int:
    """What a full cohort of this capacity grows to."""
    return round_up(capacity + min(max(STEP, capacity // 8), MOST_GROWTH))


def round_up(tokens: int) -> int:
    """The least capacity with room for so many tokens."""
    return -(-tokens // STEP) * STEP


def apply_to_slots(actions: Sequence[Action], blocks: dict[int, list[int | None]]) -> None:
    """Carry out actions on plain lists of contents: the reference that tests hold storage against."""
    for action in actions:
        match action:
            case Rebuild(key, sources, slots, _):
                old = blocks.get(key, [])
                kept = [old[source] for source in sources]
                blocks[key] = kept + [None] * (slots - len(kept))
            case Move((source_key, source_slot), (target_key, target_slot), _):
                blocks[target_key][target_slot] = blocks[source_key][source_slot]
            case Drop(key):
                del blocks[key]
