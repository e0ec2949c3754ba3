"""What the guard makes of readings: of its own model's steps, and of nobody else's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.disk import queue_bytes
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.budget import Budget, Kind
from chairlift.engine.memory.guard import READINGS, STEADY, MemoryGuard
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.plan import RunnerStats
from chairlift.engine.prefix.chain import Chain, root_digest
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.vocabulary import PrefixSpec
from tests.fakes import fake_model
from tests.server.test_memory import FakeDevice

GB = 10**9


def guard(budget: Budget, weights: int) -> MemoryGuard:
    """Of a model that has been loaded."""
    loaded = fake_model(states=StateSizes(1000), device=FakeDevice(), weight_bytes=weights)()
    return MemoryGuard.of(loaded, EngineConfig(), None, budget=budget, weights=None, wake=lambda: None)


def observe(guard: MemoryGuard, *peaks: int) -> None:
    for peak in peaks:
        guard.observe(RunnerStats(recent_peak_bytes=peak))


def settled(budget: Budget, weights: int) -> MemoryGuard:
    """The only one, whose steps take what was set apart for them."""
    one = guard(budget, weights)
    observe(one, weights, weights, weights)
    return one


def test_what_steps_take_beyond_the_headroom_is_set_apart() -> None:
    budget = Budget(20 * GB)
    one = settled(budget, 2 * GB)
    before = budget.used(Kind.HEADROOM)
    observe(one, 5 * GB, 5 * GB)
    assert budget.used(Kind.HEADROOM) == 5 * GB - 2 * GB + one.cache > before
    assert one.reactions == 1


def test_pages_that_go_between_two_readings_are_no_steps() -> None:
    """DELETE /v1/cache while requests run, copies that are written to the disk: the most in use has them."""
    budget = Budget(20 * GB)
    one = settled(budget, 2 * GB)
    left = budget.for_requests
    for kept, most in ((6 * GB, 6 * GB), (0, 6 * GB), (0, 0)):
        one.observe(RunnerStats(prefix_bytes=kept, recent_prefix_bytes=most, recent_peak_bytes=2 * GB + most))
    assert budget.for_requests == left
    observe(one, 8 * GB)
    assert budget.for_requests < left


def test_however_often_steps_take_more_half_is_left_to_requests() -> None:
    budget = Budget(20 * GB)
    one = settled(budget, 2 * GB)
    left = budget.for_requests
    observe(one, *(peak * GB for peak in range(10, 40)))
    assert budget.for_requests == left - left // 2


def test_a_model_that_goes_takes_its_memory_along() -> None:
    """What it held when the other's last reading began is in the other's next one."""
    budget = Budget(20 * GB)
    one = settled(budget, 2 * GB)
    left = budget.for_requests
    other = guard(budget, 8 * GB)
    observe(one, 10 * GB, 10 * GB, 10 * GB)
    other.close()
    observe(one, 10 * GB, 10 * GB)
    assert budget.for_requests == left
    observe(one, 2 * GB, 5 * GB)
    assert budget.for_requests < left, "its own steps are still learnt from"


def test_a_load_is_nobodys_step() -> None:
    """One that fails, and one that begins and ends between two readings."""
    budget = Budget(20 * GB)
    one = settled(budget, 2 * GB)
    left = budget.for_requests
    load = budget.hold(Kind.WEIGHTS, "other")
    observe(one, 12 * GB, 12 * GB, 12 * GB)
    load.release()
    observe(one, 12 * GB, 12 * GB)
    observe(one, 2 * GB)
    budget.hold(Kind.WEIGHTS, "other").release()
    observe(one, 12 * GB)
    assert budget.for_requests == left


def test_a_model_is_served_whatever_others_requests_hold_just_then() -> None:
    budget = Budget(3 * GB)
    busy = budget.account("busy", lambda size: 0)
    busy.use(budget.for_requests)
    one = guard(budget, GB)
    assert 0 < budget.for_requests < busy.rows
    with pytest.raises(ModelUnavailable, match="does not fit"):
        guard(budget, 3 * GB)
    assert budget.used(Kind.WEIGHTS) == GB
    one.close()


@dataclass
class FakeMachine(FakeDevice):
    """A device that shares the process's memory."""

    shared: bool = True
    taken: int = GB
    """By the process."""
    tidied: int = 0

    def footprint(self) -> int:
        return self.taken

    def tidy(self) -> None:
        self.tidied += 1


def test_what_the_process_takes_for_long_is_taken_from_requests() -> None:
    budget, machine = Budget(20 * GB), FakeMachine()
    loaded = fake_model(states=StateSizes(1000), device=machine)()
    one = MemoryGuard.of(loaded, EngineConfig(), None, budget=budget, weights=None, wake=lambda: None)
    assert budget.used(Kind.PROCESS) == GB
    machine.taken = GB + STEADY
    for _ in range(2 * READINGS):
        one.observe(RunnerStats(active_bytes=0))
    assert (budget.used(Kind.PROCESS), machine.tidied) == (GB, 0)
    machine.taken = 3 * GB
    for _ in range(READINGS - 1):
        one.observe(RunnerStats(active_bytes=GB // 2, cache_bytes=GB // 2))
    assert (budget.used(Kind.PROCESS), machine.tidied) == (GB, 1), "first what nobody uses is given back"
    for _ in range(READINGS):
        one.observe(RunnerStats(active_bytes=GB // 2, cache_bytes=GB // 2))
    assert (budget.used(Kind.PROCESS), machine.tidied) == (2 * GB, 1)
    machine.taken = GB
    for _ in range(READINGS):
        one.observe(RunnerStats())
    assert budget.used(Kind.PROCESS) == GB


@pytest.mark.parametrize("limit", [None, 0])
def test_kept_pages_go_before_there_are_too_many_buffers(limit: int | None) -> None:
    """FIELD-NOTES: `Resource limit (499000)`; also where bytes have no bound."""
    index = PrefixIndex(PrefixSpec(16, 1), 10**6)
    index.grow(Chain(root_digest(), 16, range(1600)), None, 1600)
    config = EngineConfig(memory_limit_bytes=limit)
    loaded = fake_model(states=StateSizes(1000), device=FakeDevice())()
    one = MemoryGuard.of(loaded, config, index, budget=None, weights=None, wake=lambda: None)
    one.observe(RunnerStats(buffers=390_000, buffers_limit=499_000))
    assert index.used == 1600
    one.observe(RunnerStats(buffers=450_000, buffers_limit=499_000))
    assert index.used == 800 and one.reactions == 1
    one.observe(RunnerStats(buffers=450_000))
    assert index.used == 800


@pytest.mark.parametrize(
    ("shared", "disk", "queue", "little", "set_apart"),
    [(False, 10, 4 * GB, GB // 2, 4 * GB), (False, 0, 0, 0, 0), (True, 10, 4 * GB, 2**30, 0)],
)
def test_copies_on_their_way_to_the_disk_are_set_apart(
    shared: bool, disk: int, queue: int, little: int, set_apart: int
) -> None:
    """A device of its own has them twice, for as long as they wait; what may wait is as much."""
    device = FakeMachine() if shared else FakeDevice()
    loaded = fake_model(states=StateSizes(1000), device=device, weight_bytes=GB)()
    config = EngineConfig(prefix_cache_bytes=16 * GB, prefix_cache_disk_bytes=disk * GB)
    assert queue_bytes(loaded, config) == queue
    assert queue_bytes(loaded, replace(config, prefix_cache_bytes=GB)) == little
    reserved = []
    for each in (config, EngineConfig()):
        budget = Budget(40 * GB)
        one = MemoryGuard.of(loaded, each, None, budget=budget, weights=None, wake=lambda: None)
        reserved.append(budget.used(Kind.HEADROOM))
        one.close()
        assert budget.used(Kind.HEADROOM) == 0
    assert reserved[0] - reserved[1] == set_apart
    with pytest.raises(ModelUnavailable, match="4 GB of pages on their way" if set_apart else "does not fit"):
        MemoryGuard.of(loaded, config, None, budget=Budget(GB), weights=None, wake=lambda: None)
