"""Which model is to be loaded next, and which has to go for it. Decides only, in pure Python.

A model is wanted by requests that wait for it, by the start of the server, or by an operator. The one wanted
longest is loaded next, one at a time, once there is room; where there is none, loaded models that nobody uses
go, the least recently used first. A model in use, one that somebody waits for, and a pinned one never go for
others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from chairlift.engine.quantities import size as in_words

FIRST_RETRY_S = 5.0
MOST_RETRY_S = 300.0
"""Between two attempts at a model that cannot be loaded: twice as long after each."""
YIELD_AFTER_S = 15.0
"""A model that has waited so long for room that others use has new requests of theirs wait for it."""


class State(StrEnum):
    UNLOADED = "unloaded"
    FINDING = "finding"
    """Its files are looked for, or fetched."""
    WAITING = "waiting"
    """For room, or for another's load to end."""
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


SHOWN = {State.FINDING: State.LOADING, State.WAITING: State.LOADING}
"""What is shown of states that only matter here."""


@dataclass(slots=True)
class Entry:
    """One model.

    Attributes:
        size: bytes that loading it takes; None until its files are found.
        users: requests that it answers.
        waiters: requests that wait for it.
        deferred: requests that wait for another's turn, or for it to go and come back.
        wanted: the server's start wants it, if there is room without others going.
        since: since when somebody wants it.
        last_used: when a request last began or ended.
        leaving: an operator wants it gone as soon as nobody uses it.
        retry_at: when a failed one may be tried again.
        reason: why it failed.
        blocked: since when it waits for others' answers to end.
        claims: whose room it waits for then.
    """

    name: str
    pinned: bool = False
    idle_unload_s: float | None = None
    state: State = State.UNLOADED
    size: int | None = None
    users: int = 0
    waiters: int = 0
    deferred: int = 0
    wanted: bool = False
    since: float = 0.0
    last_used: float = 0.0
    leaving: bool = False
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""
    blocked: float | None = None
    claims: frozenset[str] = frozenset()

    @property
    def shown(self) -> State:
        if self.leaving and self.state is State.LOADED:
            return State.UNLOADING  # it takes no new requests, and waits for those that it answers
        return SHOWN.get(self.state, self.state)

    @property
    def asked_for(self) -> bool:
        return self.wanted or self.waiters > 0


@dataclass(frozen=True, slots=True)
class Find:
    """Look for its files; `found` or `failed` is to follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Load:
    """Reserve its bytes, and load it; `loaded` or `failed` is to follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """`unloaded` is to follow, once its bytes are free."""

    name: str
    why: str = field(default="", compare=False)


Action = Find | Load | Unload


class Roster:
    """All models. Times are seconds of one clock; `busy` are models that compute although no
    request of them is open, which counts as use."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> Entry:
        assert entry.name not in self.entries
        self.entries[entry.name] = entry
        return entry

    # -- what happens

    def want(self, name: str, now: float) -> bool:
        """Somebody wants it now. False: it has failed, and is not tried again yet."""
        entry = self.entries[name]
        if entry.state is State.FAILED:
            if now < entry.retry_at:
                return False
            entry.state = State.UNLOADED
        if not entry.asked_for:
            entry.since = now
        return True

    def forgive(self, name: str) -> None:
        """A failed one may be tried at once."""
        self.entries[name].retry_at = 0.0

    def use(self, name: str, now: float) -> None:
        """A request begins. The model is loaded."""
        entry = self.entries[name]
        assert entry.state is State.LOADED
        entry.users += 1
        entry.last_used = now

    def leave(self, name: str, now: float) -> None:
        """A request has ended."""
        entry = self.entries[name]
        entry.users -= 1
        entry.last_used = now
        assert entry.users >= 0

    def found(self, name: str, size: int) -> None:
        entry = self.entries[name]
        assert entry.state is State.FINDING
        entry.size, entry.state = size, State.WAITING

    def loaded(self, name: str, size: int, now: float) -> None:
        entry = self.entries[name]
        assert entry.state is State.LOADING
        entry.state, entry.size, entry.last_used = State.LOADED, size, now
        entry.wanted, entry.failures, entry.reason = False, 0, ""

    def failed(self, name: str, reason: str, now: float, *, for_good: bool = False) -> None:
        """It could not be found, loaded or unloaded. `for_good`: it is not tried again."""
        entry = self.entries[name]
        entry.failures += 1
        delay = min(MOST_RETRY_S, FIRST_RETRY_S * 2 ** (entry.failures - 1))
        entry.retry_at = float("inf") if for_good else now + delay
        entry.state, entry.reason, entry.wanted, entry.leaving = State.FAILED, reason, False, False

    def unloaded(self, name: str, now: float) -> None:
        entry = self.entries[name]
        assert entry.state is State.UNLOADING
        entry.state, entry.leaving = State.UNLOADED, False
        if entry.asked_for:
            entry.since = now

    def expel(self, name: str) -> Unload:
        """It goes now, whoever uses it."""
        entry = self.entries[name]
        assert entry.state is State.LOADED
        return self._unload(entry, "an operator forced it")

    # -- what is to be done

    @property
    def settled(self) -> bool:
        """Nothing is to be done, now or later, unless something happens."""
        return not any(
            entry.leaving
            or entry.state not in (State.LOADED, State.UNLOADED, State.FAILED)
            or (entry.state is State.UNLOADED and entry.asked_for)
            or (entry.state is State.LOADED and entry.idle_unload_s is not None and not entry.pinned)
            for entry in self.entries.values()
        )

    def decide(self, now: float, available: int | None, busy: Collection[str] = ()) -> list[Action]:
        """What is to be done next; it counts as begun.

        Args:
            available: bytes that may be reserved; None: no bound is known.
        """
        actions: list[Action] = []
        for entry in self.entries.values():
            if entry.name in busy:
                entry.last_used = max(entry.last_used, now)
            if entry.state is State.LOADED and self._is_due(entry, now, busy):
                idle = entry.idle_unload_s or 0.0
                why = "an operator asked for it" if entry.leaving else f"no request came for {idle:g} s"
                actions.append(self._unload(entry, why))
            if entry.state is State.UNLOADED and entry.asked_for:
                entry.state = State.FINDING
                actions.append(Find(entry.name))
            if entry.state is State.WAITING and not entry.asked_for:
                entry.state, entry.blocked = State.UNLOADED, None
        actions += self._make_room(now, available, busy)
        return actions

    def deadline(self, now: float) -> float | None:
        """When there is something to be decided although nothing happens."""
        times = [
            entry.last_used + entry.idle_unload_s
            for entry in self.entries.values()
            if entry.state is State.LOADED
            and entry.idle_unload_s is not None
            and not (entry.pinned or entry.users or entry.waiters)
        ]
        return min(times, default=None)

    def yields(self, name: str, now: float) -> bool:
        """New requests for this model are to wait: an operator wants it gone, or another waited long enough
        for its room."""
        return self.entries[name].leaving or any(
            entry.state is State.WAITING
            and entry.blocked is not None
            and now - entry.blocked >= YIELD_AFTER_S
            and name in entry.claims
            for entry in self.entries.values()
        )

    def _is_due(self, entry: Entry, now: float, busy: Collection[str]) -> bool:
        if self._in_use(entry, busy):
            return False
        if entry.leaving:
            return True
        limit = entry.idle_unload_s
        return limit is not None and not entry.pinned and now >= entry.last_used + limit

    def _in_use(self, entry: Entry, busy: Collection[str]) -> bool:
        return entry.users > 0 or entry.waiters > 0 or entry.name in busy

    def _unload(self, entry: Entry, why: str) -> Unload:
        entry.state = State.UNLOADING
        return Unload(entry.name, why)

    def _make_room(self, now: float, available: int | None, busy: Collection[str]) -> Iterator[Action]:
        states = [entry.state for entry in self.entries.values()]
        waiting = [entry for entry in self.entries.values() if entry.state is State.WAITING]
        if State.LOADING in states or not waiting:
            return
        entry = min(waiting, key=lambda each: each.since)
        size = entry.size or 0
        if available is None or size <= available:
            entry.state, entry.blocked = State.LOADING, None
            yield Load(entry.name)
            return
        if State.UNLOADING in states:
            return  # what it frees is not there yet
        others = [each for each in self.entries.values() if each.state is State.LOADED and not each.pinned]
        most = available + sum(each.size or 0 for each in others)
        if most < size:
            self.failed(entry.name, f"it takes {in_words(size, 4)}, and {in_words(most, 4)} can be had", now)
            yield from self._make_room(now, available, busy)
            return
        if not entry.waiters:  # the start of the server: one that is loaded then is worth no less
            entry.wanted, entry.state = False, State.UNLOADED
            yield from self._make_room(now, available, busy)
            return
        idle = sorted(
            (each for each in others if not self._in_use(each, busy)), key=lambda each: each.last_used
        )
        if available + sum(each.size or 0 for each in idle) < size:
            if entry.blocked is None:
                entry.blocked, entry.claims = now, self._claimed(others, size - available)
            return  # until somebody is through
        for each in idle:
            if available >= size:
                return
            available += each.size or 0
            yield self._unload(each, f"{entry.name} needs its room")

    def _claimed(self, others: Collection[Entry], size: int) -> frozenset[str]:
        """Those whose room is to be had, the least recently used first."""
        names: set[str] = set()
        for each in sorted(others, key=lambda each: each.last_used):
            if size > 0:
                names.add(each.name)
                size -= each.size or 0
        return frozenset(names)


__all__ = ["Action", "Entry", "Find", "Load", "Roster", "State", "Unload"]
