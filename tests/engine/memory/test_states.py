"""What rows are said to take is what they take on the device, plan by plan."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.memory.budget import Account, Budget
from chairlift.engine.memory.rows import RowMemory
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.quantization import cache_factory
from chairlift.engine.models.sizes import measure_states, measure_step
from chairlift.engine.plan import Sample, StepPlan
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import Row
from chairlift.engine.runner import MlxRunner
from chairlift.engine.scheduler import Scheduler
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, Family, build
from tests.mlx.parity import solo
from tests.mlx.solo import prompt

CASES = [
    ("llama", Batching.FLAT, "auto"),
    ("gemma3_text", Batching.FLAT, "auto"),
    ("qwen3_5", Batching.HYBRID, "auto"),
    ("llama", Batching.DENSE, "auto"),
    ("llama", Batching.ROWS, "auto"),
    ("llama", Batching.SOLO, "auto"),
    ("llama", Batching.FLAT, "int8"),
]
TIGHT = [("llama", Batching.FLAT), ("gemma3_text", Batching.FLAT), ("qwen3_5", Batching.HYBRID)]


class Served:
    """A small model under a budget, as the engine serves it, one step after the other."""

    def __init__(
        self, family: str, batching: Batching, kind: str = "auto", total: int = 10**12, pages: int = 0
    ) -> None:
        config = FAMILIES[family].config
        model = solo(family).model if kind == "auto" else build(Family(family, {**config, "head_dim": 32}))
        self.runner: MlxRunner = make_runner(model, VOCABULARY, batching, kv_cache_dtype=kind)[1]
        sizes = measure_states(model, VOCABULARY, cache_factory(model, kind), batching, image_bytes=0)
        self.sizes = replace(sizes, chunk=64)
        self.budget = Budget(total)
        self.account: Account = self.budget.account(family, lambda size: 0)
        spec = self.runner.prefix if pages else None
        index = PrefixIndex(spec, pages) if spec is not None else None
        self.memory = RowMemory(self.sizes, self.account, index)
        self.scheduler = Scheduler(
            max_num_seqs=6,
            max_num_batched_tokens=64,
            max_waiting=100,
            context_length=4000,
            clock=lambda: 0.0,
            prefixes=Prefixes(index, lambda: 0.0),
            memory=self.memory,
        )
        self.settled = 0
        self.samples: dict[Row, list[Sample]] = {}

    def add(self, length: int, tokens: int) -> Row:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return self.ask(Request("r", prompt(length, length), params), seed=length)

    def ask(self, request: Request, seed: int) -> Row:
        row = self.scheduler.add(request, seed)
        self.samples[row] = []
        return row

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.settled += plan.settle
        result = self.runner.step(plan)
        committed = self.scheduler.commit(result)
        assert not committed.failed
        for row, sample in committed.drawn:
            self.samples[row].append(sample)
            if row.drawn == row.limit:
                self.scheduler.finish(row)
        return plan

    def run(self) -> None:
        while self.scheduler.busy:
            self.step()


@pytest.mark.parametrize(("family", "batching", "kind"), CASES)
def test_the_projection_is_what_the_runner_holds(family: str, batching: Batching, kind: str) -> None:
    chance = random.Random(5)
    served = Served(family, batching, kind)
    lengths = [1, 2, 3, 63, 64, 65, 128, 200, 255, 260, *(chance.randint(1, 300) for _ in range(4))]
    chance.shuffle(lengths)
    rows = []
    while lengths or served.scheduler.busy:
        if lengths and chance.random() < 0.4:
            rows.append(served.add(lengths.pop(), chance.choice([1, 2, 5, 70])))
        if rows and chance.random() < 0.05:
            served.scheduler.finish(chance.choice(rows))
        if rows and chance.random() < 0.05:
            served.scheduler.preempt(chance.choice(rows))
        served.step()
        states, runner = served.memory.states, served.runner
        if served.sizes.shared:
            layout = runner._residents.batch.layout
            got = {key: (cohort.capacity, cohort.slots) for key, cohort in states.layout.cohorts.items()}
            want = {key: (cohort.capacity, cohort.slots) for key, cohort in layout.cohorts.items()}
            assert got == want and states.layout.lengths == layout.lengths
        own = sum(row.caches is not None for row in runner._residents.rows.values())
        assert own == len(states.own) or not served.sizes.shared
        assert runner.stats().kv_bytes <= states.nbytes <= served.memory.used
    assert served.memory.states.nbytes == served.runner.stats().kv_bytes == 0


def test_the_projection_is_tight() -> None:
    """Rows that decode take to the byte what is said."""
    for family, batching in TIGHT:
        served = Served(family, batching)
        for length in (10, 70, 300, 310):
            served.add(length, 60)
        while any(row.id is None or not row.launched for row in served.scheduler.rows):
            served.step()
        served.step()  # the last row joins, and is there twice
        for _ in range(4):
            served.step()
            assert served.runner.stats().kv_bytes == served.memory.states.nbytes == served.memory.used


@pytest.mark.parametrize("batching", [Batching.ROWS, Batching.FLAT])
def test_a_row_that_begins_with_a_kept_prefix_takes_what_is_said(batching: Batching) -> None:
    """Its caches grow from where the prefix ends."""
    served = Served("llama", batching, pages=10**9)
    for length in (300, 320):
        row = served.ask(Request("r", prompt(400, 0)[:length], SamplingParams(max_tokens=220)), seed=length)
        while not row.finished:
            served.step()
            assert served.runner.stats().kv_bytes <= served.memory.states.nbytes
    assert row.cached == 300


def test_caches_of_a_kind_of_their_own_are_counted() -> None:
    """Windows, and beside them one state for every four tokens, in arrays of three axes."""
    served = Served("deepseek_v41", Batching.SOLO)
    row = served.add(300, 3)
    while not row.finished:
        served.step()
        held, said = served.runner.stats().kv_bytes, served.memory.states.nbytes
        assert held <= said
        assert said <= 2 * held or not row.output, "room for the whole prompt is counted from its beginning"
    assert row.drawn == 3


def test_a_row_that_has_a_cohort_to_itself_is_not_copied() -> None:
    served = Served("llama", Batching.FLAT)
    served.add(3000, 3)
    while not served.scheduler.rows[0].launched:
        served.step()
    held = served.memory.states.nbytes
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    served.step()
    mx.synchronize()
    assert served.runner._residents.batch.order
    # The scores of 3,000 tokens take some on a CPU; a copy would take all of it, a layer's a third or more.
    assert mx.get_peak_memory() - before < held / 4
    assert served.memory.used == served.memory.states.nbytes == held == served.sizes.slots(1, 3008)
    served.run()


def test_steps_take_memory_that_grows_with_their_tokens() -> None:
    served = Served("llama", Batching.FLAT)
    small, large = (measure_step(served.runner, VOCABULARY, tokens) for tokens in (32, 256))
    assert 0 < small < large
    assert served.runner.stats().rows == 0
