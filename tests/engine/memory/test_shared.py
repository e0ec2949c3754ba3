"""Several engines under one budget: together they stay within it, and everyone who fits alone finishes."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from chairlift.engine.memory.budget import Account, Budget
from chairlift.engine.memory.rows import RowMemory
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.row import Row
from chairlift.engine.scheduler import Scheduler
from tests.engine.test_scheduler_machine import Driver

SIZES = (StateSizes(10), StateSizes(4, row_bytes=900, early=True))


@dataclass
class Served:
    """Engines that take turns, one step each. One that can do nothing sleeps until it is woken."""

    total: int
    now: float = 0.0
    budget: Budget = field(init=False)
    drivers: list[Driver] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    woken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.budget = Budget(self.total)
        for number, sizes in enumerate(SIZES):
            self._begin(number, sizes)

    def _begin(self, number: int, sizes: StateSizes) -> None:
        index = PrefixIndex(PrefixSpec(16, 10), self.total // 4)
        memory: list[RowMemory] = []
        account = self.budget.account(
            str(number), lambda size: memory[0].shrink(size), lambda: self.woken.add(number)
        )
        memory.append(RowMemory(sizes, account, index))
        scheduler = Scheduler(
            max_num_seqs=4,
            max_num_batched_tokens=128,
            max_waiting=1000,
            context_length=2000,
            clock=lambda: self.now,
            prefixes=Prefixes(index, lambda: self.now),
            memory=memory[0],
        )
        self.drivers.append(Driver(scheduler))
        self.accounts.append(account)

    def add(self, engine: int, prompt: int, tokens: int) -> Row:
        self.now += 1
        self.woken.add(engine)
        return self.drivers[engine].add(prompt, tokens, seed=prompt)

    def step(self) -> bool:
        """Whether anybody did anything."""
        moved = False
        for number, driver in enumerate(self.drivers):
            if driver.scheduler.busy and (driver.scheduler.pause == 0 or number in self.woken):
                self.woken.discard(number)
                driver.step()
                moved = True
            # A step may be given room for its last row, whatever others have promised themselves.
            assert self.budget.used_by_requests <= self.total or driver.scheduler.running <= 1
        return moved


requests = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=10)
@given(rows=requests, room=st.floats(1, 3))
def test_everyone_finishes(rows: list[tuple[int, int, int]], room: float) -> None:
    largest = max(SIZES[engine].alone(prompt, prompt + tokens - 1) for engine, prompt, tokens in rows)
    served = Served(int(largest * room))
    for engine, prompt, tokens in rows:
        served.add(engine, prompt, tokens)
    for _ in range(40 * len(rows) + 6 * sum(prompt + tokens for _, prompt, tokens in rows)):
        if not served.step():
            break
    for driver in served.drivers:
        assert not driver.scheduler.busy, "somebody sleeps, and nobody wakes it"
        assert all(row.output == driver.expected[row.arrival] for row in driver.rows)
        assert driver.runner.violations == []


def test_who_waits_longest_is_next_whichever_engine_it_is_in() -> None:
    sizes = SIZES[0]
    served = Served(sizes.alone(1000, 1049))
    served.add(1, 20, 200)
    served.step()
    long = served.add(0, 1000, 50)
    young = [served.add(1, 20, 100) for _ in range(3)]
    for _ in range(60):
        served.step()
    assert long.id is None and all(row.id is None for row in young), "younger ones took what it waits for"
    while any(driver.scheduler.busy for driver in served.drivers):
        assert served.step()
        if long.timing.admitted is None:
            assert all(row.timing.admitted is None for row in young)


def test_nobody_keeps_memory_for_a_request_that_was_cancelled() -> None:
    sizes = SIZES[0]
    served = Served(sizes.alone(1000, 1049))
    served.add(1, 900, 200)
    served.step()
    gone = served.add(0, 1000, 50)
    for _ in range(15):
        served.step()
    assert gone.id is None and served.accounts[0].waiting_since is not None
    served.drivers[0].scheduler.finish(gone)
    assert served.drivers[0].scheduler.pause is None, "it looks again and again for nobody"
    young = served.add(1, 20, 20)
    while any(driver.scheduler.busy for driver in served.drivers):
        assert served.step()
    assert young.output == served.drivers[1].expected[young.arrival]


def test_a_small_request_is_looked_at_while_a_large_one_waits_for_another_model() -> None:
    sizes = SIZES[0]
    served = Served(sizes.alone(1000, 1049) + 3000)
    served.add(1, 900, 200)
    served.step()
    large = served.add(0, 1000, 50)
    for _ in range(15):
        served.step()
    scheduler = served.drivers[0].scheduler
    assert large.id is None and scheduler.pause
    small = served.add(0, 20, 5)
    assert scheduler.pause == 0
    while not small.finished:
        assert served.step()
    assert large.timing.admitted is None and not served.drivers[1].rows[0].finished
