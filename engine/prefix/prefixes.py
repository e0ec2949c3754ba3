"""All that the scheduler has to do with kept prefixes: in memory, on the disk, and for rows in hand. Pure.

Without an index nothing is kept, nothing is found and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from chairlift.engine.prefix.chain import root_digest
from chairlift.engine.prefix.fetch import Catalogue, Fetch
from chairlift.engine.prefix.images import NamedPrompt, name_images
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.row import RowPrefix
from chairlift.engine.prefix.vocabulary import Load, Page, PageData, PrefixStats, Restore, Save
from chairlift.engine.prefix.waiting import FetchingRows
from chairlift.engine.prefix.worth import FetchWorth
from chairlift.engine.request import Request
from chairlift.engine.row import Row, RowState


class Computing:
    """Rows that prefill, by how their prompts begin: a queue is held against them row by row."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[bytes, list[Row]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        if row.prefix is not None and (beginning := row.prefix.beginning) is not None:
            self._rows.setdefault(beginning, []).append(row)

    def beside(self, row: Row) -> Sequence[Row]:
        """Those that have a block in common with the row."""
        beginning = row.prefix.beginning if row.prefix is not None else None
        return self._rows.get(beginning, ()) if beginning is not None else ()


class Prefixes:
    """
    Args:
        index: what is kept in memory; None keeps nothing.
        clock: monotonic seconds.
        identity: the model, as prefixes are named by it.
        catalogue: what the disk keeps; None where there is none.
        computes: tokens a second that prompts are computed at, as far as is known.
    """

    def __init__(
        self,
        index: PrefixIndex | None,
        clock: Callable[[], float],
        *,
        identity: str = "",
        catalogue: Catalogue | None = None,
        computes: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.index = index
        self.identity = identity
        self._clock = clock
        self._fetching: FetchingRows | None = None
        if index is not None and catalogue is not None:
            self._fetching = FetchingRows(
                catalogue, index.spec, index.limit // 2, clock, FetchWorth(computes)
            )
        self._keep: list[Save] = []

    @property
    def stats(self) -> PrefixStats:
        return self.index.stats if self.index is not None else PrefixStats()

    # Rows

    def of(self, request: Request) -> RowPrefix | None:
        """What a row of this request has to do with kept prefixes; None for one that is not kept."""
        if self.index is None or request.sampling.prompt_logprobs is not None:
            return None
        prompt: NamedPrompt | None = NamedPrompt(request.prompt_token_ids)
        if request.media is not None and request.media.digests:
            prompt = name_images(request.prompt_token_ids, request.media, self.index.spec.image_tokens)
        if prompt is None:
            return None
        return RowPrefix(self.index, root_digest(self.identity, request.cache_salt), prompt)

    def waits(self, row: Row, computing: Computing) -> bool:
        """Whether the row had better wait: for what one of the others is computing, or for the disk, whose
        fetch begins here."""
        if row.prefix is None:
            return False
        for other in computing.beside(row):
            if other.prefix is not None and row.prefix.awaits(other.prefix, other.prefilled):
                return True
        return self._fetching is not None and self._fetching.holds(row)

    def take_over(self, row: Row) -> Restore | None:
        """What a row that is admitted begins with."""
        if row.prefix is None:
            return None
        row.prefix.known(row.known)
        restore = row.prefix.take_over()
        if restore is not None and self._fetching is not None:
            self._fetching.takes_over(restore)
        return restore

    def keep(self, row: Row) -> None:
        """Have what a row holds at its end saved, once, before its state goes."""
        if row.prefix is None or row.id is None or row.kept or row.state is not RowState.RUNNING:
            return
        row.kept = True
        tokens = [*row.request.prompt_token_ids, *row.output][: row.held]
        if (save := row.prefix.at_end(row.id, tokens, row.held)) is not None:
            self._keep.append(save)

    def leave(self, row: Row) -> None:
        """The row has gone from the queue, or from its seat: it waits for nothing."""
        if self._fetching is not None:
            self._fetching.forget(row)

    # Plans

    def pause(self, queue: Collection[Row]) -> float | None:
        """Seconds until one of the queue may be planned; None for never, unless something happens."""
        if self._fetching is None:
            return 0.0 if queue else None
        if self._fetching.loading() or not all(map(self._fetching.waits, queue)):
            return 0.0
        deadline = self._fetching.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def deferred(self, queue: Iterable[Row]) -> int:
        """How many of the queue wait for the disk, as far as is known."""
        return sum(map(self._fetching.waits, queue)) if self._fetching is not None else 0

    @property
    def has_dropped(self) -> bool:
        """The next plan has something to drop."""
        return self.index is not None and self.index.has_dropped

    def load(self, *, running: bool) -> list[Load]:
        """What the next plan loads of what the disk has answered."""
        return self._fetching.load(running=running) if self._fetching is not None else []

    def changed(self) -> tuple[tuple[int, ...], tuple[Save, ...]]:
        """Pages to drop, and of rows that end to save; none stands in both."""
        drop = self.index.take_dropped() if self.index is not None else ()
        if self._fetching is None:
            self.take_distrusted()  # there is no disk that would ask
        keep = tuple(save for kept in self._keep if (save := kept.without(drop)) is not None)
        self._keep.clear()
        return drop, keep

    # Loss

    def spoil(self, ids: Iterable[int]) -> None:
        """The runner has not got these as they should be."""
        if self.index is not None:
            self.index.spoil(ids)

    def forget(self) -> None:
        """Nothing of what memory keeps can be relied upon."""
        if self.index is not None:
            self.index.clear()

    def clear(self) -> None:
        """Keep nothing of what rows have left so far; rows that wait for the disk compute."""
        if self._fetching is not None:
            self._fetching.clear()
        self.forget()

    # The disk

    def take_fetches(self) -> list[Fetch]:
        """Files to read for rows in the queue, each asked for once; `fetched` takes the answer."""
        return self._fetching.take() if self._fetching is not None else []

    def fetched(self, number: int, data: Mapping[bytes, PageData]) -> None:
        """The disk's answer to a fetch: by digest, what it has and what is right. One that nobody waits for
        any more is dropped."""
        if self._fetching is not None:
            self._fetching.arrive(number, data)

    def wants(self, number: int) -> bool:
        """Whether a row still waits for this fetch. May be asked from any thread."""
        return self._fetching is not None and self._fetching.wants(number)

    def take_used(self) -> list[Page]:
        """Pages and checkpoints that rows have begun with, since last asked."""
        return self._fetching.take_used() if self._fetching is not None else []

    def take_distrusted(self) -> tuple[bytes, ...]:
        """Digests of pages and checkpoints that rows have left which went wrong, since last asked."""
        return self.index.take_distrusted() if self.index is not None else ()
