"""The layout's invariants under any sequence of joins, leaves and steps, against plain lists."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.cache.layout import (
    FLOOR,
    MOST_GROWTH,
    RATIO,
    STEP,
    Action,
    CohortLayout,
    Drop,
    Move,
    Place,
    Rebuild,
    apply_to_slots,
)

LENGTHS = st.integers(0, 700) | st.sampled_from((0, 1, 62, 63, 64, 254, 255, 256, 257, 511, 512, 2000, 4095))


def cohorts_touched(actions: Iterable[Action]) -> set[int]:
    """Cohorts that actions write to or forget."""
    touched = set()
    for action in actions:
        match action:
            case Rebuild(key) | Drop(key):
                touched.add(key)
            case Move(_, (key, _), _):
                touched.add(key)
    return touched


class Machine(RuleBasedStateMachine):
    """Joins, leaves and steps of a layout, its actions carried out on lists of row ids."""

    single = False
    floor = FLOOR

    def __init__(self) -> None:
        super().__init__()
        self.layout = CohortLayout(single=self.single, floor=self.floor)
        self.contents: dict[int, list[int | None]] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        self.lengths: dict[int, int] = {}
        self.longest_ever = 0
        self.next_row = 0

    def carry_out(self, actions: Sequence[Action], allowed: set[int]) -> None:
        """Apply actions, after a look at whom they concern: cohorts of `allowed` and nothing else."""
        assert cohorts_touched(actions) <= allowed
        for action in actions:
            match action:
                case Rebuild(key, sources, slots, capacity):
                    assert len(set(sources)) == len(sources) <= slots
                    self.shapes[key] = (slots, capacity)
                case Move((source, slot), (target, other), tokens):
                    row = self.contents[source][slot]
                    assert row is not None and tokens == self.lengths[row]
                    assert tokens <= self.shapes[target][1]
                    assert other < self.shapes[target][0]
                case Drop(key):
                    del self.shapes[key]
            apply_to_slots([action], self.contents)

    def undisturbed(self) -> dict[int, tuple[list[int | None], int]]:
        cohorts = self.layout.cohorts.values()
        return {cohort.key: (list(cohort.slots), cohort.capacity) for cohort in cohorts}

    def assert_others_undisturbed(
        self, before: dict[int, tuple[list[int | None], int]], touched: set[int]
    ) -> None:
        now = self.undisturbed()
        for key in before.keys() - touched:
            assert now[key] == before[key]

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=6))
    def join(self, lengths: list[int]) -> None:
        rows = {self.next_row + index: length for index, length in enumerate(lengths)}
        self.next_row += len(rows)
        before = self.undisturbed()
        actions = self.layout.join(rows.items())
        self.lengths |= rows
        joined = {self.layout.places[row].cohort for row in rows}
        self.carry_out(actions, joined)
        assert not any(isinstance(action, Move | Drop) for action in actions)
        for row in rows:
            place = self.layout.places[row]
            self.contents[place.cohort][place.slot] = row
        self.assert_others_undisturbed(before, joined)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        left = {self.layout.places[row].cohort}
        before = self.undisturbed()
        actions = self.layout.leave(row)
        del self.lengths[row]
        self.carry_out(actions, left)
        self.assert_others_undisturbed(before, left)

    @precondition(lambda self: self.lengths)
    @rule(count=st.integers(1, 70))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.make_room()
            self.layout.advance(self.layout.rows)
            for row in self.lengths:
                self.lengths[row] += 1

    def make_room(self) -> None:
        order, places = self.layout.rows, dict(self.layout.places)
        full = [row for row in order if self.lengths[row] == self.shapes[places[row].cohort][1]]
        if not full:
            assert self.layout.make_room(order) == []
            return
        before = self.undisturbed()
        actions = self.layout.make_room(order)
        concerned = {p[row].cohort for row in full for p in (places, self.layout.places)}
        self.carry_out(actions, concerned)
        self.assert_others_undisturbed(before, concerned)
        for cohort in self.layout.cohorts.values():
            assert all(self.lengths[row] < cohort.capacity for row in cohort.rows)

    @invariant()
    def every_row_has_one_place_and_its_contents_there(self) -> None:
        layout = self.layout
        assert layout.lengths == self.lengths
        assert layout.places.keys() == self.lengths.keys()
        assert sorted(layout.rows) == sorted(self.lengths)
        for cohort in layout.cohorts.values():
            for slot, row in enumerate(cohort.slots):
                if row is not None:
                    assert layout.places[row] == Place(cohort.key, slot)
        for row, place in layout.places.items():
            assert self.contents[place.cohort][place.slot] == row

    @invariant()
    def storage_has_the_layouts_shape(self) -> None:
        layout = self.layout
        wanted = {key: (len(c.slots), c.capacity) for key, c in layout.cohorts.items()}
        assert self.shapes == wanted
        assert {key: len(slots) for key, slots in self.contents.items()} == {
            key: slots for key, (slots, _) in wanted.items()
        }
        assert layout.held_tokens == sum(self.lengths.values())
        assert layout.allocated_tokens == sum(slots * capacity for slots, capacity in wanted.values())

    @invariant()
    def memory_is_bounded(self) -> None:
        """A cohort has fewer than two slots a row, and room for at most RATIO times its shortest row and one
        growth; so a layout allocates less than 2 * (RATIO + 1/8) times what its rows hold, plus 2 * 9/8 of a
        floor for each row."""
        self.longest_ever = max([self.longest_ever, *self.lengths.values()])
        for cohort in self.layout.cohorts.values():
            assert cohort.rows
            assert len(cohort.slots) < 2 * len(cohort.rows)
            assert cohort.capacity % STEP == 0
            shortest = min(self.lengths[row] for row in cohort.rows) + 1
            if self.single:
                assert cohort.capacity <= self.longest_ever + STEP + MOST_GROWTH
            else:
                aim = max(self.floor, RATIO * shortest)
                assert cohort.capacity <= min(aim * 9 / 8, aim + MOST_GROWTH)
        if not self.single:
            rows = len(self.lengths)
            bound = 2 * 9 / 8 * (RATIO * (self.layout.held_tokens + rows) + self.floor * rows)
            assert self.layout.allocated_tokens <= bound


class SingleMachine(Machine):
    single = True

    @invariant()
    def rows_are_in_the_first_slots(self) -> None:
        assert len(self.layout.cohorts) <= 1
        for cohort in self.layout.cohorts.values():
            assert cohort.slots[: len(cohort.rows)] == cohort.rows


class WideMachine(Machine):
    floor = 2 * FLOOR


FEW = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None)
TestCohorts = Machine.TestCase
TestCohorts.settings = FEW
TestSingle = SingleMachine.TestCase
TestSingle.settings = FEW
TestWide = WideMachine.TestCase
TestWide.settings = settings(FEW, max_examples=15)


def test_a_mix_of_lengths_costs_little_more_than_their_sum() -> None:
    lengths = [100 + 500 * n // 27 for n in range(28)] + [4000, 4100, 4200, 32000]
    for seed in range(20):
        random.Random(seed).shuffle(lengths)
        layout = CohortLayout()
        for row, length in enumerate(lengths):
            layout.join([(row, length)])
        assert layout.allocated_tokens <= 1.15 * layout.held_tokens


def test_rows_of_one_length_share_a_cohort_and_a_long_one_gets_its_own() -> None:
    layout = CohortLayout()
    layout.join([(row, 300) for row in range(4)])
    assert layout.join([(4, 5000)]) == [Rebuild(1, (), 1, 5056)]
    assert [cohort.rows for cohort in layout.cohorts.values()] == [[0, 1, 2, 3], [4]]


def test_rows_below_the_floor_share_a_cohort_whatever_their_lengths() -> None:
    layout = CohortLayout()
    layout.join([(0, 0), (1, 100), (2, FLOOR - 1)])
    assert len(layout.cohorts) == 1


def test_a_join_takes_a_free_slot_without_an_action() -> None:
    layout = CohortLayout()
    layout.join([(row, 70) for row in range(3)])
    assert layout.leave(1) == []
    assert layout.join([(3, 71)]) == []
    assert layout.places[3] == Place(0, 1)


def test_growth_leaves_spare_slots() -> None:
    layout = CohortLayout()
    layout.join([(row, 70) for row in range(8)])
    assert layout.join([(8, 70)]) == [Rebuild(0, tuple(range(8)), 10, 128)]
    assert layout.join([(9, 70)]) == []


def test_a_row_that_outgrows_its_cohort_moves_and_the_rest_is_packed() -> None:
    layout = CohortLayout()
    layout.join([(0, FLOOR)])
    layout.leave(0)
    layout.join([(1, 10), (2, FLOOR - 1)])
    layout.advance([1, 2])
    actions = layout.make_room([1, 2])
    assert actions == [
        Rebuild(2, (), 1, FLOOR + STEP),
        Move((1, 1), (2, 0), FLOOR),
        Rebuild(1, (0,), 1, STEP),
    ]
    assert layout.rows == [1, 2]


def test_a_dense_hole_is_filled_by_the_last_row() -> None:
    layout = CohortLayout(single=True)
    layout.join([(row, 10 * row) for row in range(5)])
    assert layout.leave(1) == [Move((0, 4), (0, 1), 40)]
    assert layout.leave(4) == [Move((0, 3), (0, 1), 30)]
    assert layout.rows == [0, 3, 2]


@pytest.mark.parametrize("rows", [[(7, 3), (1, 5)], [(7, 3), (8, -1)], [(7, 3), (7, 4)]])
def test_a_refused_join_changes_nothing(rows: list[tuple[int, int]]) -> None:
    layout = CohortLayout()
    layout.join([(1, 5)])
    with pytest.raises(ValueError, match=r"^Row \d"):
        layout.join(rows)
    assert layout.rows == [1]
    assert layout.join([(7, 3)]) == [Rebuild(0, (0,), 2, 64)]


def test_a_row_that_is_not_there_cannot_leave() -> None:
    with pytest.raises(KeyError):
        CohortLayout().leave(3)
