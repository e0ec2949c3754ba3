"""Rows that wait while what they begin with is fetched from the disk: who, for what, and how long. Pure.

A fetch goes out once, when its row is next in line; a row that would fetch what is under way for another
waits for that. What has come is loaded piece by piece, so that the steps of running rows are not held up,
and then the row takes it over as anything that memory had all along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chairlift.engine.prefix.fetch import Catalogue, Fetch
from chairlift.engine.prefix.vocabulary import Load, Page, PageData, PrefixSpec, Restore
from chairlift.engine.prefix.worth import FetchWorth
from chairlift.engine.row import Row

PATIENCE = 30.0
"""Seconds after which a fetch counts as failed."""
PENALTY = 60.0
"""Seconds without further fetches after one that took too long: the disk hangs."""
LOAD_BYTES = 64 * 2**20
"""Most bytes that a plan loads while rows run: copying them takes some ten milliseconds."""


@dataclass(slots=True)
class _Waiting:
    row: Row
    fetch: Fetch
    deadline: float
    asked: float
    """When, by the clock."""
    arrived: deque[tuple[Page, PageData]] | None = None
    """Still to load, without ids; None until the disk has answered."""
    whole: bool = False
    """The disk had all that was asked for."""


@dataclass(slots=True)
class FetchingRows:
    """
    Args:
        catalogue: what is on the disk.
        spec: sizes of pages.
        limit: bytes that may be under way, unless one fetch alone has more.
        clock: monotonic seconds.
        worth: whether computing is sooner done.
    """

    catalogue: Catalogue
    spec: PrefixSpec
    limit: int
    clock: Callable[[], float]
    worth: FetchWorth
    timeouts: int = 0
    _used: list[Page] = field(default_factory=list)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)  # by number of the fetch
    _of_row: dict[int, int] = field(default_factory=dict)  # number of the fetch, by the row's arrival
    _behind: set[int] = field(default_factory=set)  # arrivals of rows that wait for another's fetch
    _asked: set[int] = field(default_factory=set)  # arrivals of rows that have had their fetch, or need none
    _under_way: set[bytes] = field(default_factory=set)
    _new: list[Fetch] = field(default_factory=list)
    _next: int = 1
    _paused_until: float = float("-inf")

    def holds(self, row: Row) -> bool:
        """Whether the row has to wait. Starts its fetch if there is something to fetch."""
        if row.arrival in self._of_row or row.arrival in self._behind:
            return True
        if row.prefix is None or row.arrival in self._asked or self.clock() < self._paused_until:
            return False
        pages = row.prefix.missing(self.catalogue)
        if not pages:
            self._asked.add(row.arrival)
            return False
        nbytes = sum(
            page.tokens * self.spec.bytes_per_token if page.tokens else self.spec.checkpoint_bytes
            for page in pages
        )
        if not self.worth.of(nbytes, max(page.start + page.tokens for page in pages) - row.prefix.available):
            self._asked.add(row.arrival)
            return False
        busy = sum(waiting.fetch.nbytes for waiting in self._waiting.values())
        if self._waiting and (
            nbytes + busy > self.limit or any(page.digest in self._under_way for page in pages)
        ):
            self._behind.add(row.arrival)
            return True
        row.prefix.fetches()
        fetch = Fetch(self._next, pages, nbytes)
        self._next += 1
        self._waiting[fetch.number] = _Waiting(row, fetch, self.clock() + PATIENCE, self.clock())
        self._of_row[row.arrival] = fetch.number
        self._asked.add(row.arrival)
        self._under_way.update(page.digest for page in pages)
        self._new.append(fetch)
        return True

    def take(self) -> list[Fetch]:
        """Fetches to start, each once."""
        new = [fetch for fetch in self._new if fetch.number in self._waiting]
        self._new.clear()
        return new

    def takes_over(self, restore: Restore) -> None:
        """A row begins with these."""
        self._used += restore.pages
        if restore.checkpoint is not None:
            self._used.append(restore.checkpoint)

    def take_used(self) -> list[Page]:
        """Pages and checkpoints that rows have taken over, since last asked."""
        used, self._used = self._used, []
        return used

    def wants(self, number: int) -> bool:
        """Whether anyone still waits for a fetch. Safe to ask from any thread."""
        return number in self._waiting

    def arrive(self, number: int, data: Mapping[bytes, PageData]) -> None:
        """The disk has answered: by digest, the pages that it has and that are right."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.arrived is not None:
            return
        pages = waiting.fetch.pages
        complete = not self.spec.checkpointed or pages[-1].digest in data
        waiting.arrived = deque()
        for page in pages if complete else ():
            if page.digest not in data:
                break
            waiting.arrived.append((page, data[page.digest]))
        waiting.whole = len(waiting.arrived) == len(pages)
        if self.spec.checkpointed and not waiting.whole:
            waiting.arrived.clear()
        if not waiting.arrived:
            self._end(waiting)

    def load(self, *, running: bool) -> list[Load]:
        """What the next plan loads. Rows all of whose pages have been loaded wait no longer."""
        self._expire()
        loads: list[Load] = []
        left = LOAD_BYTES if running else float("inf")
        for waiting in list(self._waiting.values()):
            batch: list[tuple[Page, PageData]] = []
            while waiting.arrived and left > 0:
                batch.append(waiting.arrived.popleft())
                left -= batch[-1][1].data.nbytes
            if batch:
                assert waiting.row.prefix is not None
                adopted = waiting.row.prefix.adopt([page for page, _ in batch])
                loads += [
                    Load(page, data)
                    for page, (_, data) in zip(adopted, batch, strict=True)
                    if page is not None
                ]
            if waiting.arrived is not None and not waiting.arrived:
                if batch and waiting.whole:
                    self.worth.fetched(waiting.fetch.nbytes, self.clock() - waiting.asked)
                self._end(waiting)
        return loads

    def forget(self, row: Row) -> None:
        """The row waits for nothing any more, and may fetch again when it is next in line."""
        self._asked.discard(row.arrival)
        self._behind.discard(row.arrival)
        if (number := self._of_row.get(row.arrival)) is not None:
            self._end(self._waiting[number])

    def clear(self) -> None:
        """Rows wait for nothing any more, and compute."""
        for waiting in list(self._waiting.values()):
            self._end(waiting)

    def loading(self) -> bool:
        """There is something to load."""
        return any(waiting.arrived for waiting in self._waiting.values())

    def waits(self, row: Row) -> bool:
        """Whether the row waits, as far as is known."""
        return row.arrival in self._of_row or row.arrival in self._behind

    def next_deadline(self) -> float | None:
        """When the next fetch will have taken too long, by the clock."""
        return min((waiting.deadline for waiting in self._waiting.values()), default=None)

    def _expire(self) -> None:
        now = self.clock()
        for waiting in list(self._waiting.values()):
            if waiting.arrived is None and waiting.deadline <= now:
                self.timeouts += 1
                self._paused_until = now + PENALTY
                self._end(waiting)

    def _end(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.fetch.number]
        del self._of_row[waiting.row.arrival]
        self._under_way.difference_update(page.digest for page in waiting.fetch.pages)
        self._behind.clear()
