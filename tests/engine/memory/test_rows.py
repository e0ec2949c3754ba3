"""Under any budget: what rows hold stays within it, everyone who fits alone finishes, in a bounded order."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from chairlift.cache.layout import STEP, round_up
from chairlift.engine.errors import MemoryExceeded
from chairlift.engine.media import PreparedMedia
from chairlift.engine.memory.budget import Budget, Kind, Reservation
from chairlift.engine.memory.holdings import holding
from chairlift.engine.memory.rows import MAX_OVERTAKEN, RowMemory
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.plan import StepPlan
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import RequestTiming, Row, RowState
from chairlift.engine.scheduler import Scheduler
from tests.engine.test_scheduler_machine import Driver

CONTEXT = 2000
SIZES = {
    "flat": StateSizes(10),
    "windows": StateSizes(6, windows=((128, 8),)),
    "hybrid": StateSizes(4, row_bytes=900, early=True),
    "recurrent": StateSizes(0, row_bytes=2000, early=True),
    "dense": StateSizes(10, early=True, single=True),
    "alone": StateSizes(10, shared=False),
}


@dataclass
class Served:
    """A scheduler under a budget, driven step by step."""

    sizes: StateSizes
    total: int
    seqs: int = 8
    tokens: int = 256
    spec: PrefixSpec | None = None
    budget: Budget = field(init=False)
    driver: Driver = field(init=False)
    memory: RowMemory = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.total)
        index = PrefixIndex(self.spec, self.total // 2) if self.spec is not None else None
        memory: list[RowMemory] = []
        account = self.budget.account("a model", lambda size: memory[0].shrink(size))
        memory.append(RowMemory(self.sizes, account, index))
        self.memory = memory[0]
        scheduler = Scheduler(
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.tokens,
            max_waiting=1000,
            context_length=CONTEXT,
            clock=lambda: 0.0,
            prefixes=Prefixes(index, lambda: 0.0),
            memory=self.memory,
        )
        self.driver = Driver(scheduler)

    def step(self) -> StepPlan:
        plan = self.driver.step()
        assert plan is not None
        begun = {page.id for new in plan.admit if new.restore for page in new.restore.pages}
        assert not begun & {*plan.drop}, "a row begins with pages that go before"
        assert self.memory.states.nbytes <= self.memory.used, "more is held than was projected"
        assert self.memory.used + self.budget.used(Kind.PREFIX) <= self.total
        assert self.memory.used >= least_bytes(self.sizes, self.driver.scheduler)
        return plan

    def run(self, most: int) -> int:
        steps = 0
        while self.driver.scheduler.busy:
            self.step()
            steps += 1
            assert steps <= most, "it does not end"
        return steps


def least_bytes(sizes: StateSizes, scheduler: Scheduler) -> int:
    """Of tokens alone, whatever the layout: less cannot be held."""
    total = 0
    for row in scheduler.rows:
        if row.state is RowState.PREFILLING or row.decodable:
            tokens = len(row.request.prompt_token_ids) + row.drawn
            total += sizes.row_bytes + tokens * sizes.token_bytes
            total += sum(min(tokens, window) * size for window, size in sizes.windows)
    return total


requests = st.lists(
    st.tuples(st.one_of(st.integers(1, 100), st.integers(1, 1500)), st.integers(1, 150), st.integers(-1, 1)),
    min_size=1,
    max_size=14,
)


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.sampled_from(list(SIZES.values())),
    rows=requests,
    room=st.floats(1, 4),
    pages=st.booleans(),
    seqs=st.integers(1, 8),
)
@example(  # the last begins with what the sixth left, as far as that has not gone for them all
    sizes=SIZES["flat"],
    rows=[
        *((318, 4, 0), (948, 47, 0), (1, 8, 0), (1, 8, 0), (1, 51, 0), (1370, 104, 0), (26, 40, 0)),
        *((256, 33, 0), (1370, 1, 0)),
    ],
    room=3.75,
    pages=True,
    seqs=7,
)
@example(  # the last row joins in the step in which the first moves out of the cohort
    sizes=SIZES["hybrid"],
    rows=[(197, 61, 0), (1, 60, 0), (960, 1, 0), (2, 1, 0)],
    room=1.0,
    pages=False,
    seqs=3,
)
@example(  # the oldest row grows while another, with caches of its own, has launched its only draw
    sizes=SIZES["windows"],
    rows=[(1, 1, 0), (192, 1, 0), (1022, 2, 0), (639, 3, 0)],
    room=1.1327476953338482,
    pages=True,
    seqs=2,
)
def test_everyone_who_fits_alone_finishes_within_the_budget(
    sizes: StateSizes, rows: list[tuple[int, int, int]], room: float, pages: bool, seqs: int
) -> None:
    largest = max(sizes.alone(prompt, prompt + tokens - 1) for prompt, tokens, _ in rows)
    spec = PrefixSpec(16, max(1, sizes.token_bytes)) if pages else None
    served = Served(sizes, int(largest * room), seqs=seqs, spec=spec)
    for prompt, tokens, priority in rows:
        served.driver.add(prompt, tokens, priority=priority, seed=prompt)
    tokens = sum(prompt + tokens for prompt, tokens, _ in rows)
    served.run(40 * len(rows) + 3 * tokens)
    assert all(row.output == served.driver.expected[row.arrival] for row in served.driver.rows)
    assert served.driver.runner.violations == []
    assert served.memory.states.nbytes == served.memory.used == 0
    assert served.budget.accounts[0].least == 0 and served.budget.accounts[0].waiting_since is None


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(sorted(SIZES)), rows=requests, room=st.floats(1, 30), arriving=st.integers(1, 14))
def test_rows_admitted_since_there_is_plenty_are_those_that_fit(
    name: str, rows: list[tuple[int, int, int]], room: float, arriving: int
) -> None:
    """The same plans and the same numbers as if each were tried out."""
    sizes = SIZES[name]
    largest = max(sizes.alone(prompt, prompt + tokens - 1) for prompt, tokens, _ in rows)
    quick, slow = (Served(sizes, int(largest * room), seqs=12) for _ in range(2))
    slow.memory._most_with = lambda row: None  # type: ignore[method-assign]
    waiting = list(rows)
    while waiting or quick.driver.scheduler.busy:
        for prompt, tokens, priority in waiting[:arriving]:
            for served in (quick, slow):
                served.driver.add(prompt, tokens, priority=priority, seed=prompt)
        waiting = waiting[arriving:]
        assert quick.step() == slow.step()
        assert quick.memory.used == slow.memory.used


def test_nobody_takes_the_room_of_one_that_gave_its_state_up_and_comes_back_in_the_same_plan() -> None:
    sizes = SIZES["flat"]
    account = Budget(30_000).account("a model", lambda size: 0)
    memory = RowMemory(sizes, account)
    back, young = (
        Row(Request(str(at), tuple(range(40)), SamplingParams()), 0, 1900, at, RequestTiming(0.0))
        for at in range(2)
    )
    back.preempted = 5  # it is to have room for 2048 tokens more, which is all of it
    assert memory.over([], []) == [] and memory.admits(back)
    assert not memory.admits(young)


def test_plenty_is_seen_without_trying_each_row_out() -> None:
    sizes = SIZES["flat"]
    served = Served(sizes, 10**9, seqs=200)
    tried: list[int] = []
    needs_of = served.memory._needs_of
    served.memory._needs_of = lambda trial: (tried.append(1), needs_of(trial))[1]  # type: ignore[method-assign]
    for seed in range(150):
        served.driver.add(40, 3, seed=seed)
    served.step()
    assert served.driver.scheduler.waiting == 143 and len(tried) == 1


@settings(deadline=None, max_examples=12)
@given(rows=requests, room=st.floats(1, 2))
@example(  # rows 3 and 5 gave their states up, and shorter ones had the tokens of a step
    rows=[
        *((1, 110, 0), (1468, 69, 0), (340, 61, 0), (1, 126, 0), (309, 100, 0), (40, 38, 0), (21, 116, 0)),
        *((260, 123, 0), (38, 143, 0), (58, 37, 0), (1, 129, 0), (1, 83, 0), (773, 4, 0)),
    ],
    room=1.2255241342555871,
)
def test_the_oldest_row_keeps_its_state_and_who_lost_it_comes_back_first(
    rows: list[tuple[int, int, int]], room: float
) -> None:
    sizes = SIZES["flat"]
    served = Served(
        sizes, int(max(sizes.alone(prompt, prompt + tokens - 1) for prompt, tokens, _ in rows) * room)
    )
    for prompt, tokens, _ in rows:
        served.driver.add(prompt, tokens, seed=prompt)
    lost: set[Row] = set()
    while served.driver.scheduler.busy:
        before = {row: row.preempted for row in served.driver.rows}
        held = [row for row in served.driver.rows if row.id is not None and not row.finished]
        fresh = [row for row in served.driver.rows if row.timing.admitted is None]
        served.step()
        lost = {row for row in lost if not row.finished and row.id is None}
        begun = [row for row in fresh if row.timing.admitted is not None]
        passed = [row for row in lost if any(row.arrival < other.arrival for other in begun)]
        assert not passed, "a newer row was admitted before one that gave its state up"
        now = {row for row in served.driver.rows if row.preempted > before[row]}
        if held and (oldest := min(held, key=lambda row: row.arrival)) in now:
            raise AssertionError(f"the oldest row, {oldest.arrival}, gave its state up")
        lost |= {row for row in now if row.id is None}


def test_rows_grow_until_the_youngest_gives_up_and_answers_are_the_same() -> None:
    """Three rows fit with their prompts, and two with their answers."""
    sizes = SIZES["flat"]
    served = Served(sizes, 3 * sizes.slots(1, 448))
    for seed in range(3):
        served.driver.add(200, 400, seed=seed)
    served.run(3000)
    first, second, third = served.driver.rows
    assert first.preempted == 0 and third.preempted >= 1
    assert third.preempted + second.preempted == served.memory.counts.preemptions <= 4
    assert all(row.output == served.driver.expected[row.arrival] for row in served.driver.rows)


def test_kept_pages_go_before_rows_do() -> None:
    sizes = StateSizes(10)
    served = Served(sizes, 2 * sizes.slots(1, 1024) + sizes.slots(1, 320), spec=PrefixSpec(16, 10))
    served.driver.add(600, 2, seed=1)
    served.run(100)
    index = served.driver.scheduler.prefixes.index
    assert index is not None and index.used > 5000
    for seed in (2, 3):
        served.driver.add(700, 60, seed=seed)
    served.run(1000)
    assert index.evicted > 0
    assert served.memory.counts.preemptions == 0


def test_a_long_request_is_not_passed_for_ever() -> None:
    sizes = SIZES["flat"]
    served = Served(sizes, sizes.alone(1500, 1600), seqs=4)
    served.driver.add(400, 150, seed=1)
    served.step()
    long = served.driver.add(1500, 100, seed=2)
    passed = 0
    for seed in range(60):
        young = served.driver.add(20, 3, seed=3 + seed)
        for _ in range(4):
            served.step()
        passed += long.timing.admitted is None and young.timing.admitted is not None
    assert passed <= MAX_OVERTAKEN + 3, "those that were admitted with the eighth"
    served.run(2000)
    assert long.output == served.driver.expected[long.arrival]


def test_rows_that_never_fit_are_refused_with_the_numbers() -> None:
    sizes = StateSizes(1000)
    served = Served(sizes, sizes.slots(1, 640))
    with pytest.raises(MemoryExceeded) as refused:
        served.driver.add(640, 1)
    assert refused.value.param == "prompt"
    assert refused.value.available == 640_000 and refused.value.needed == 704_000
    most = refused.value.most
    for prompt in (1, 100, most // 2, most - 1):
        served.driver.add(prompt, most - prompt)
        with pytest.raises(MemoryExceeded) as refused:
            served.driver.add(prompt, 900)
        assert (refused.value.param, refused.value.most) == ("max_tokens", most)
    with pytest.raises(MemoryExceeded):
        served.driver.add(100, most - 99)
    assert "needs" not in refused.value.message and "640.0" not in refused.value.message
    assert f"Up to {most} tokens fit" in refused.value.message
    served.run(3000)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("room", [7_000, 23_041, 41_000, 103_300])
def test_what_fits_does_so_however_it_is_divided(sizes: StateSizes, room: int) -> None:
    longest = sizes.longest(room, 9000)
    for prompt in range(1, longest, 7):
        assert sizes.alone(prompt, longest - 1) <= room
    assert longest == 9000 or sizes.alone(1, longest) > room


def test_an_answer_of_no_given_length_ends_where_memory_does() -> None:
    sizes = StateSizes(1000)
    served = Served(sizes, sizes.slots(1, 640))
    row = served.driver.add(100, None)
    assert 400 <= row.limit < 640 - 100
    served.run(1000)
    assert row.drawn == row.limit


@settings(deadline=None, max_examples=10)
@given(sizes=st.sampled_from(list(SIZES.values())), prompt=st.integers(1, 700), answer=st.integers(1, 300))
@example(sizes=SIZES["hybrid"], prompt=576, answer=60)  # its first room ends where its prompt does
def test_what_a_row_takes_alone_is_what_it_is_said_to_take_wherever_it_starts_again(
    sizes: StateSizes, prompt: int, answer: int
) -> None:
    total = prompt + answer - 1
    need = sizes.alone(prompt, total)
    for again in {
        prompt,
        (prompt + total) // 2,
        max(prompt, total - STEP - 1),
        max(prompt, total - 1),
        total,
    }:
        served = Served(sizes, need)
        served.driver.add(prompt, answer)
        served.step()
        row = served.driver.rows[0]
        while row.drawn < again - prompt and not row.finished:
            served.step()
        if not row.finished:
            served.driver.scheduler.preempt(row)
        served.run(2000)
        assert row.output == served.driver.expected[0]
    assert need >= sizes.slots(1, min(round_up(total), CONTEXT)) // 2


def test_a_load_is_refused_that_would_take_what_was_promised() -> None:
    sizes = SIZES["flat"]
    served = Served(sizes, 20_000)
    row = served.driver.add(900, 100)
    need = sizes.alone(900, 999)
    assert not isinstance(served.budget.reserve(20_000 - need + 1, Kind.WEIGHTS), Reservation)
    assert isinstance(served.budget.reserve(20_000 - need, Kind.WEIGHTS), Reservation)
    served.run(1000)
    assert row.output == served.driver.expected[0]


def test_a_row_keeps_what_its_images_tokens_are_read_as() -> None:
    sizes = StateSizes(10, image_bytes=50)
    served = Served(sizes, 10**9)
    media = PreparedMedia({"pixel_values": np.zeros((3, 8), np.float32)}, ("a", "b"), (300, 40))
    plain, seeing = (
        Request("r", (1,) * 400, SamplingParams(max_tokens=4), media=given) for given in (None, media)
    )
    rows = [served.driver.scheduler.add(request, 0) for request in (plain, seeing)]
    assert [holding(sizes, row).extra for row in rows] == [0, 340 * 50 + 96]
    assert served.budget.accounts[0].least == sizes.alone(400, 403) + 340 * 50 + 96


def test_a_step_waits_for_the_one_before_where_both_do_not_fit() -> None:
    sizes = SIZES["flat"]
    for rows_at_once, settles in ((1, True), (10, False)):
        served = Served(sizes, rows_at_once * sizes.alone(900, 910))
        for seed in (1, 2, 3):
            served.driver.add(900, 5, seed=seed)
        settled = []
        while served.driver.scheduler.busy:
            settled.append(served.step().settle)
        assert any(settled) == settles and served.memory.counts.settled == sum(settled)
