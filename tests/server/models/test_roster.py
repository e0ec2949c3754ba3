"""Which model is loaded, and which goes for it: rules that hold whatever happens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.server.models.roster import Action, Entry, Find, Load, Roster, State, Unload

TOTAL = 100


class Machine(RuleBasedStateMachine):
    """A roster over a budget of 100 bytes, driven by requests, operators and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.roster = Roster()
        self.sizes = {"a": 40, "b": 40, "c": 60, "pin": 20, "huge": 120, "small": 10}
        for name in self.sizes:
            idle = 10.0 if name in ("a", "c") else None
            self.roster.add(Entry(name, pinned=name == "pin", idle_unload_s=idle))
        self.held: dict[str, int] = {}
        self.busy: set[str] = set()
        self.begun: list[Action] = []

    @property
    def available(self) -> int:
        return TOTAL - sum(self.held.values())

    def entry(self, name: str) -> Entry:
        return self.roster.entries[name]

    def decide(self) -> None:
        before = {
            name: (entry.state, entry.users, entry.waiters) for name, entry in self.roster.entries.items()
        }
        used = {name: entry.last_used for name, entry in self.roster.entries.items()}
        leaving = {name for name, entry in self.roster.entries.items() if entry.leaving}
        actions = self.roster.decide(self.now, self.available, self.busy)
        for action in actions:
            state, users, waiters = before[action.name]
            if isinstance(action, Load):
                assert self.entry(action.name).asked_for
                assert self.sizes[action.name] <= self.available
                self.held[action.name] = self.sizes[action.name]
            elif isinstance(action, Unload):
                assert state is State.LOADED and not users and not waiters and action.name not in self.busy
                assert not self.entry(action.name).pinned or action.name in leaving
                if action.name not in leaving and self.now < used[action.name] + (
                    self.entry(action.name).idle_unload_s or 1e9
                ):
                    # For room: nobody who was used longer ago, and could have gone, stays.
                    for name, other in self.roster.entries.items():
                        if other.state is State.LOADED and not other.pinned and name not in self.busy:
                            assert other.users or other.waiters or used[name] >= used[action.name]
            else:
                assert self.entry(action.name).asked_for
        self.begun += actions

    @rule(name=st.sampled_from(["a", "b", "c", "pin", "huge", "small"]))
    def a_request_waits(self, name: str) -> None:
        if self.roster.want(name, self.now):
            self.entry(name).waiters += 1
        else:
            assert self.entry(name).state is State.FAILED and self.now < self.entry(name).retry_at
        self.decide()

    @rule(name=st.sampled_from(["a", "b", "c", "pin", "huge", "small"]))
    def an_operator_wants_it(self, name: str) -> None:
        self.roster.forgive(name)
        assert self.roster.want(name, self.now)
        if self.entry(name).state is not State.LOADED:
            self.entry(name).wanted = True
        self.decide()

    @rule(name=st.sampled_from(["a", "b", "c", "pin", "huge", "small"]), served=st.booleans())
    def a_waiter_goes(self, name: str, served: bool) -> None:
        entry = self.entry(name)
        if entry.waiters:
            entry.waiters -= 1
            if served and entry.state is State.LOADED:
                self.roster.use(name, self.now)
        self.decide()

    @rule(name=st.sampled_from(["a", "b", "c", "pin", "small"]))
    def a_request_ends(self, name: str) -> None:
        if self.entry(name).users:
            self.roster.leave(name, self.now)
        self.decide()

    @rule(name=st.sampled_from(["a", "b", "c", "pin", "small"]))
    def an_operator_wants_it_gone(self, name: str) -> None:
        if self.entry(name).state is State.LOADED:
            self.entry(name).leaving = True
        self.decide()

    @rule(name=st.sampled_from(["a", "b", "c"]), busy=st.booleans())
    def it_computes_for_nobody(self, name: str, busy: bool) -> None:
        (self.busy.add if busy and self.entry(name).state is State.LOADED else self.busy.discard)(name)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @precondition(lambda self: self.begun)
    @rule(at=st.integers(0, 5), fails=st.sampled_from([False, False, True]))
    def something_is_done(self, at: int, fails: bool) -> None:
        action = self.begun.pop(min(at, len(self.begun) - 1))
        self.finish(action, fails)
        self.decide()

    def finish(self, action: Action, fails: bool = False) -> None:
        name = action.name
        if isinstance(action, Unload):
            del self.held[name]
            self.busy.discard(name)
            self.roster.unloaded(name, self.now)
        elif fails:
            self.held.pop(name, None)
            self.roster.failed(name, "no", self.now)
        elif isinstance(action, Find):
            self.roster.found(name, self.sizes[name])
        else:
            self.roster.loaded(name, self.sizes[name], self.now)

    @invariant()
    def never_more_than_there_is(self) -> None:
        assert self.available >= 0
        assert sum(entry.state is State.LOADING for entry in self.roster.entries.values()) <= 1
        for name, entry in self.roster.entries.items():
            holds = entry.state in (State.LOADING, State.LOADED, State.UNLOADING)
            assert (name in self.held) == holds
            assert not entry.users or entry.state is State.LOADED

    def teardown(self) -> None:
        """Once nobody uses anything, whoever is waited for gets there, or is told that it cannot."""
        self.busy.clear()
        for entry in self.roster.entries.values():
            while entry.users:
                self.roster.leave(entry.name, self.now)
        for _ in range(60):
            self.now += 1
            self.decide()
            for entry in self.roster.entries.values():
                if entry.waiters and entry.state in (State.LOADED, State.FAILED):
                    entry.waiters = 0
            while self.begun:
                self.finish(self.begun.pop(0))
        for entry in self.roster.entries.values():
            assert not entry.waiters, entry
            assert entry.state in (State.LOADED, State.UNLOADED, State.FAILED), entry


TestRoster = Machine.TestCase
TestRoster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def roster(**sizes: int) -> Roster:
    made = Roster()
    for name in sizes:
        made.add(Entry(name))
    return made


def fill(made: Roster, name: str, size: int, now: float) -> None:
    entry = made.entries[name]
    entry.state, entry.size, entry.last_used = State.LOADED, size, now


def test_the_least_recently_used_goes_and_no_more_than_must() -> None:
    made = roster(a=40, b=40, c=30)
    fill(made, "a", 40, 2.0)
    fill(made, "b", 40, 1.0)
    assert made.want("c", 3.0)
    made.entries["c"].waiters = 1
    assert made.decide(3.0, 20) == [Find("c")]
    made.found("c", 30)
    (gone,) = made.decide(3.0, 20)
    assert gone == Unload("b") and isinstance(gone, Unload) and "needs its room" in gone.why
    assert made.decide(3.0, 20) == []
    made.unloaded("b", 4.0)
    assert made.decide(4.0, 60) == [Load("c")]


def test_one_that_is_in_use_is_waited_for() -> None:
    made = roster(a=100, b=50)
    fill(made, "a", 100, 0.0)
    made.use("a", 0.0)
    made.want("b", 1.0)
    made.entries["b"].waiters = 1
    made.decide(1.0, 0)
    made.found("b", 50)
    assert made.decide(1.0, 0) == [] and made.entries["b"].shown is State.LOADING
    made.leave("a", 2.0)
    assert made.decide(2.0, 0, {"a"}) == []
    assert made.decide(2.5, 0) == [Unload("a")]


def test_who_has_waited_long_has_others_wait() -> None:
    made = roster(a=50, b=50, c=40)
    fill(made, "a", 50, 2.0)
    fill(made, "b", 50, 1.0)
    made.use("a", 2.0)
    made.use("b", 1.0)
    made.want("c", 3.0)
    made.entries["c"].waiters = 1
    made.decide(3.0, 0)
    made.found("c", 40)
    assert made.decide(3.0, 0) == []
    assert not made.yields("b", 17.9) and made.yields("b", 18.0)
    assert not made.yields("a", 99.0) and not made.yields("c", 99.0)
    made.leave("b", 20.0)
    assert made.decide(20.0, 0) == [Unload("b")]
    made.unloaded("b", 21.0)
    assert made.decide(21.0, 50) == [Load("c")] and not made.yields("b", 99.0)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    made = roster(a=50, b=90)
    made.entries["a"].pinned = True
    fill(made, "a", 50, 0.0)
    made.want("b", 1.0)
    made.entries["b"].waiters = 1
    made.decide(1.0, 50)
    made.found("b", 90)
    assert made.decide(1.0, 50) == []
    assert (made.entries["b"].state, made.entries["b"].reason) == (
        State.FAILED,
        "it takes 90 B, and 50 B can be had",
    )


def test_a_failed_one_is_tried_again_later_and_later() -> None:
    made = roster(a=1)
    waits = []
    now = 0.0
    for _ in range(9):
        assert made.want("a", now)
        made.entries["a"].wanted = True
        made.decide(now, None)
        made.failed("a", "no", now)
        waits.append(made.entries["a"].retry_at - now)
        assert not made.want("a", made.entries["a"].retry_at - 0.1)
        now = made.entries["a"].retry_at
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    made.forgive("a")
    assert made.want("a", 0.0)


def test_an_idle_one_goes_when_its_time_has_come_and_a_pinned_one_stays() -> None:
    made = roster(a=1, pin=1)
    made.entries["a"].idle_unload_s = made.entries["pin"].idle_unload_s = 10.0
    made.entries["pin"].pinned = True
    fill(made, "a", 1, 5.0)
    fill(made, "pin", 1, 0.0)
    assert made.deadline(6.0) == 15.0
    assert made.decide(14.9, None) == []
    assert made.decide(15.0, None, {"a"}) == [] and made.deadline(15.0) == 25.0
    assert made.decide(25.0, None) == [Unload("a")] and made.deadline(25.0) is None


def test_two_loads_are_never_under_way_at_once() -> None:
    made = roster(a=1, b=1)
    for name in ("b", "a"):
        made.want(name, 1.0 if name == "a" else 0.0)
        made.entries[name].waiters = 1
    assert made.decide(1.0, None) == [Find("a"), Find("b")]
    made.found("a", 1)
    made.found("b", 1)
    assert made.decide(1.0, None) == [Load("b")] and made.decide(1.0, None) == []
    made.loaded("b", 1, 2.0)
    assert made.decide(2.0, None) == [Load("a")]
