"""Rows that wait for the disk: what is fetched, who waits, and what comes of it."""

from __future__ import annotations

import pytest

from chairlift.engine.prefix import waiting
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.prefix.worth import RETRY, SAMPLES, SHORT, FetchWorth
from chairlift.engine.row import RowState
from tests.engine.fake_disk import FakeDisk
from tests.engine.test_scheduler_machine import Driver, make
from tests.fakes import Fault, all_rows

ANYWHERE = PrefixSpec(4, 1)
CHECKPOINTS = PrefixSpec(4, 1, checkpoint_bytes=6, checkpoint_tokens=64)


class Lodge:
    """A driver with a disk, and a clock to set."""

    def __init__(self, spec: PrefixSpec = ANYWHERE, room: int = 10**6, budget: int = 512) -> None:
        self.now = 0.0
        self.disk = FakeDisk()
        self.scheduler = make(4, budget, 16, spec, room, self.disk, lambda: self.now)
        self.driver = Driver(self.scheduler, disk=self.disk)
        self.driver.runner.spill(self.disk)
        self.runner = self.driver.runner

    def finish(self, *, answer: bool = True) -> None:
        while self.scheduler.busy:
            if self.scheduler.pause:
                assert answer and self.disk.pending
                self.disk.answer(self.scheduler)
            self.driver.step()
        assert self.runner.violations == []
        for row in self.driver.rows:
            if row.arrival in self.driver.reached_limit:
                assert row.output == self.driver.expected[row.arrival]

    def left_behind(self, prompt: int, tokens: int = 8) -> list[int]:
        """Have a prompt answered and memory emptied; what the row held."""
        row = self.driver.add(prompt, tokens)
        self.finish(answer=False)
        assert self.scheduler.prefixes.index is not None
        self.scheduler.prefixes.index.clear()
        return [*row.request.prompt_token_ids, *row.output]


@pytest.mark.parametrize(("spec", "cached"), [(ANYWHERE, 204), (CHECKPOINTS, 207)])
def test_what_memory_lost_is_fetched_and_taken_over(spec: PrefixSpec, cached: int) -> None:
    lodge = Lodge(spec)
    tokens = lodge.left_behind(200)
    row = lodge.driver.add([*tokens, 1, 2, 3], 4)
    lodge.driver.step()
    assert row.state is RowState.WAITING and lodge.scheduler.running == 0
    assert lodge.scheduler.pause == waiting.PATIENCE, "the loop can sleep until then"
    lodge.driver.step()
    assert len(lodge.disk.pending) == 1, "asked for once"
    lodge.disk.answer(lodge.scheduler)
    assert lodge.scheduler.pause == 0
    lodge.finish()
    assert row.cached == cached, "the last token of an answer is never fed"
    assert lodge.scheduler.prefixes.stats.disk_hit_tokens == cached
    again = lodge.driver.add([*tokens, 1, 2, 3], 4)
    lodge.finish(answer=False)
    assert again.cached >= cached, "memory has it now"


@pytest.mark.parametrize(("rate", "cached"), [(5.0, 104), (100.0, 0), (None, 104)])
def test_what_is_sooner_computed_is_not_fetched(rate: float | None, cached: int) -> None:
    """A first fetch has shown that a hundred tokens take ten seconds."""
    lodge = Lodge()
    fetching = lodge.scheduler.prefixes._fetching
    assert fetching is not None
    fetching.worth = FetchWorth(lambda: rate)
    tokens = lodge.left_behind(100)
    assert lodge.scheduler.prefixes.index is not None
    first = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.now += 10
    lodge.finish()
    assert first.cached == 104
    lodge.scheduler.prefixes.index.clear()
    second = lodge.driver.add(tokens, 4, seed=1)
    lodge.driver.step()
    assert bool(lodge.disk.pending) is bool(cached)
    lodge.finish()
    assert second.cached == cached


def test_now_and_then_the_disk_is_tried_again() -> None:
    worth = FetchWorth(lambda: 1000.0)
    assert worth.of(10**9, 10), "nothing is known of the disk"
    worth.fetched(10**6, 1.0)
    assert worth.of(250_000, 1), "it is not worth asking whether it is worth it"
    asked = [worth.of(10**6, 999) for _ in range(2 * RETRY)]
    assert [index for index, made in enumerate(asked, 1) if made] == [RETRY, 2 * RETRY]
    assert worth.of(10**6, 1000)
    for _ in range(SAMPLES):
        worth.fetched(10**9, 1.0)
    assert worth.of(10**6, 999)


def test_short_fetches_tell_nothing_of_long_ones() -> None:
    worth = FetchWorth(lambda: 1000.0)
    worth.fetched(10**9, 1.0)
    for _ in range(SAMPLES):
        worth.fetched(10**6, SHORT / 5)
    assert worth.of(10**9, 1000) and not worth.of(10**9, 999)


def test_a_disk_that_has_become_fast_is_known_by_fetches_that_are_short_now() -> None:
    worth = FetchWorth(lambda: 1000.0)
    worth.fetched(10**9, 10.0)
    assert not worth.of(10**9, 1000)
    for _ in range(SAMPLES):
        worth.fetched(10**9, SHORT / 5)
    assert worth.of(10**9, 1000)


def test_a_fetch_that_found_little_tells_nothing_of_the_disk() -> None:
    lodge = Lodge()
    fetching = lodge.scheduler.prefixes._fetching
    assert fetching is not None
    fetching.worth = FetchWorth(lambda: 100.0)
    tokens = lodge.left_behind(100)
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.now += 10
    lodge.disk.answer(lodge.scheduler, most=5)
    lodge.finish(answer=False)
    assert row.cached == 20
    assert fetching.worth.of(10**9, 1), "nothing is known"


def test_other_rows_go_on_meanwhile() -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    running = lodge.driver.add(50, 30, seed=9)
    lodge.driver.step()
    row = lodge.driver.add(tokens, 4)
    for _ in range(5):
        lodge.driver.step()
    assert running.drawn >= 4 and row.state is RowState.WAITING
    lodge.finish()
    assert row.cached == 104


def test_the_same_is_not_fetched_twice() -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    rows = [lodge.driver.add([*tokens[:80], number], 4) for number in (1, 2, 3)]
    other = lodge.driver.add([*range(90, 0, -1)], 4)
    lodge.driver.step()
    assert len(lodge.disk.pending) == 1 and other.state is not RowState.WAITING
    lodge.finish()
    assert [row.cached for row in rows] == [80, 80, 80] and other.cached == 0


@pytest.mark.parametrize(("most", "cached"), [(0, 0), (5, 20), (None, 104)])
def test_what_is_not_there_is_computed(most: int | None, cached: int) -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.disk.answer(lodge.scheduler, most=most)
    lodge.finish(answer=False)
    assert row.cached == cached


def test_pages_without_their_checkpoint_are_of_no_use() -> None:
    lodge = Lodge(CHECKPOINTS)
    tokens = lodge.left_behind(200)
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.disk.answer(lodge.scheduler, most=len(lodge.disk.pending[0].pages) - 1)
    assert lodge.scheduler.prefixes.index is not None and len(lodge.scheduler.prefixes.index) == 0
    lodge.finish(answer=False)
    assert row.cached == 0


def test_a_disk_that_hangs_is_left_alone_for_a_while() -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.now = waiting.PATIENCE
    assert lodge.scheduler.pause == 0
    lodge.finish(answer=False)
    assert row.cached == 0 and row.drawn == 4
    lodge.disk.answer(lodge.scheduler)
    assert lodge.scheduler.prefixes.index is not None
    lodge.scheduler.prefixes.index.clear()
    for seconds, fetches in ((1, 0), (waiting.PENALTY, 1)):
        lodge.now = waiting.PATIENCE + seconds
        lodge.driver.add(tokens, 4)
        lodge.driver.step()
        assert len(lodge.disk.pending) == fetches
        lodge.finish()
        lodge.scheduler.prefixes.index.clear()


def test_a_row_that_is_cancelled_waits_no_more_and_the_next_fetches() -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    first, second = (lodge.driver.add([*tokens, number], 4) for number in (1, 2))
    lodge.driver.step()
    (fetch,) = lodge.disk.pending
    assert lodge.scheduler.prefixes.wants(fetch.number)
    lodge.scheduler.finish(first)
    assert not lodge.scheduler.prefixes.wants(fetch.number)
    lodge.driver.step()
    assert len(lodge.disk.pending) == 2
    lodge.disk.answer(lodge.scheduler, 0)
    assert second.state is RowState.WAITING
    lodge.finish()
    assert second.cached == 104


def test_no_more_is_fetched_than_memory_takes() -> None:
    lodge = Lodge(room=60)
    tokens = lodge.left_behind(200)
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    assert sum(page.tokens for page in lodge.disk.pending[0].pages) == 60
    lodge.finish()
    assert row.cached == 60


def test_little_is_not_fetched() -> None:
    lodge = Lodge()
    tokens = lodge.left_behind(100)
    lodge.driver.add([*tokens[:7], *range(40)], 4)
    lodge.finish(answer=False)


def test_while_rows_run_plans_load_little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOAD_BYTES", 100)
    lodge = Lodge(CHECKPOINTS)
    tokens = lodge.left_behind(200)
    lodge.driver.add(50, 100, seed=9)
    lodge.driver.step()
    row = lodge.driver.add(tokens, 4)
    lodge.driver.step()
    lodge.disk.answer(lodge.scheduler)
    loads = []
    while row.id is None:
        plan = lodge.driver.step()
        assert plan is not None
        loads.append(sum(load.data.data.nbytes for load in plan.load))
    assert len(loads) > 5 and all(0 < nbytes <= 100 + 4 * 207 for nbytes in loads[:-1])
    lodge.finish()
    assert row.cached == 207


def test_what_a_row_left_that_went_wrong_goes_from_the_disk_too() -> None:
    lodge = Lodge(budget=32)
    lodge.driver.add(100, 4)
    for _ in range(3):
        lodge.driver.step()
    assert lodge.disk.files
    lodge.runner.fail_next(Fault(fail=all_rows))
    lodge.finish(answer=False)
    assert lodge.disk.files == {}
