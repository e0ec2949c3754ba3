"""A disk whose answers a test gives when it likes."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.engine.prefix.fetch import Fetch
from chairlift.engine.prefix.vocabulary import Page, PageData, ReadPage
from chairlift.engine.scheduler import Scheduler


@dataclass
class FakeDisk:
    """Keeps what it is offered. A `Catalogue` and a `PageSink`."""

    files: dict[bytes, tuple[Page, PageData]] = field(default_factory=dict)
    pending: list[Fetch] = field(default_factory=list)
    """Not answered yet."""
    full: bool = False
    _returned: list[int] = field(default_factory=list)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.files

    def wants(self, page: Page, nbytes: int) -> bool:
        return not self.full

    def offer(self, page: Page, nbytes: int, read: ReadPage) -> None:
        data = read()
        assert data is not None and data.data.nbytes == nbytes
        if page.digest in self.files:
            assert bytes(self.files[page.digest][1].data) == bytes(data.data), "one name for two things"
        self.files[page.digest] = page, data
        self._returned.append(page.id)

    def returned(self) -> list[int]:
        returned, self._returned = self._returned, []
        return returned

    def follow(self, scheduler: Scheduler) -> None:
        """Do what the engine's disk does for it after each plan, but for reading."""
        self.pending += scheduler.prefixes.take_fetches()
        scheduler.prefixes.take_used()
        for digest in scheduler.prefixes.take_distrusted():
            self.files.pop(digest, None)

    def answer(self, scheduler: Scheduler, index: int = 0, most: int | None = None) -> None:
        """To the fetch at `index`, with at most so many of its pages."""
        fetch = self.pending.pop(index)
        found = {
            page.digest: self.files[page.digest][1]
            for page in fetch.pages[:most]
            if page.digest in self.files
        }
        for page in fetch.pages:
            if page.digest in found:
                kept = self.files[page.digest][0]
                assert (kept.start, kept.tokens, kept.parent) == (page.start, page.tokens, page.parent)
        scheduler.prefixes.fetched(fetch.number, found)
