"""What the runner keeps of rows for later ones: pages and checkpoints, by id.

Which are kept and which go is decided by the scheduler's `PrefixIndex`; here they are only stored. All
methods run on the MLX thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from chairlift.cache.device import on_cuda
from chairlift.cache.pages import PageFormat, State
from chairlift.cache.transfer import transfer
from chairlift.engine.offers import Offers
from chairlift.engine.prefix.vocabulary import Load, Page, PageSink, PrefixSpec, Restore, Save
from chairlift.engine.residents import Residents

log = logging.getLogger(__name__)


class PageStore:
    """Args: pages: how the model's caches become pages; without, nothing is kept. spec: the same in sizes."""

    def __init__(self, pages: PageFormat | None = None, spec: PrefixSpec | None = None) -> None:
        self.spec = spec
        self._pages_of = pages
        self._nbytes = self._height = 0
        self._pages: dict[int, mx.array] = {}
        self._states: dict[int, State] = {}
        self._spoiled: set[int] = set()
        self._offers: Offers | None = None

    @property
    def _format(self) -> PageFormat:
        if self._pages_of is None:
            raise RuntimeError("Nothing is kept of this model's rows.")
        return self._pages_of

    @property
    def nbytes(self) -> int:
        """Of all that is kept, and of copies that the disk has not written yet."""
        return self._nbytes + (self._offers.nbytes if self._offers is not None else 0)

    @property
    def height(self) -> int:
        """Most bytes of the same since this was last asked."""
        height, self._height = self._height, self.nbytes
        return height

    @property
    def buffers(self) -> int:
        """Arrays of the same."""
        copies = self._offers.buffers if self._offers is not None else 0
        return len(self._pages) + len(self._states) + copies

    def drop(self, ids: Iterable[int]) -> None:
        dropped = tuple(ids)
        for id in dropped:
            page, state = self._pages.pop(id, None), self._states.pop(id, None)
            self._nbytes -= (page.nbytes if page is not None else 0) + (state.data.nbytes if state else 0)
        if self._offers is not None:
            self._offers.withhold(dropped)
            self._offers.take_back()

    def save(self, save: Save, residents: Residents) -> list[mx.array]:
        """Keep copies of a row's state. Returns the new arrays, to evaluate; where it fails, the pages
        count as spoiled."""
        try:
            new = self._save(save, residents)
        except Exception:
            log.exception("pages of row %d could not be made", save.row)
            self.spoil(save)
            return []
        self._height = max(self._height, self.nbytes)
        return new

    def _save(self, save: Save, residents: Residents) -> list[mx.array]:
        if save.row not in residents.rows:
            self.spoil(save)
            return []
        new: list[tuple[Page, mx.array]] = []
        if save.pages:
            start, last = save.pages[0].start, save.pages[-1]
            planes = residents.planes(save.row, self._format, start, last.start + last.tokens)
            parts = [(page.start - start, page.start - start + page.tokens) for page in save.pages]
            packed = self._format.pack_many(planes, parts)
            for page, data in zip(save.pages, packed, strict=True):
                self._put(page, data)
                new.append((page, data))
        if save.checkpoint is not None:
            held = residents.rows[save.row].held
            if held != save.checkpoint.start:
                raise ValueError(f"The row holds {held} tokens, not {save.checkpoint.start}.")
            state = self._format.pack_state(residents.states(save.row, self._format))
            self._put(save.checkpoint, state)
            new.append((save.checkpoint, state.data))
        copies = self._offers.copy(new) if self._offers is not None else []
        return [*(data for _, data in new), *copies]

    def _put(self, page: Page, kept: mx.array | State) -> None:
        if isinstance(kept, State):
            self._states[page.id] = kept
            self._nbytes += kept.data.nbytes
        else:
            self._pages[page.id] = kept
            self._nbytes += kept.nbytes

    def load(self, loads: Iterable[Load]) -> None:
        """Keep what comes from outside; where it is not what it should be, it counts as spoiled."""
        came = tuple(loads)
        for load, data in zip(came, _arrays_of([load.data.data for load in came]), strict=True):
            page = load.page
            try:
                if data is None:
                    raise ValueError("It could not be made an array.")
                if not page.tokens:
                    self._put(page, self._format.state_of(data, load.data.shapes))
                elif data.shape == (self._format.page_bytes(page.tokens),):
                    self._put(page, data)
                else:
                    raise ValueError(f"A page of {page.tokens} tokens has {data.size} bytes.")
            except Exception:
                log.exception("a page from the disk could not be loaded")
                self._spoiled.add(page.id)
        self._height = max(self._height, self.nbytes)

    def spill(self, sink: PageSink) -> None:
        """From now on, offer what is kept to `sink`."""
        self._offers = Offers(sink, apart=on_cuda(), transfer=transfer())

    def landed(self, saves: Iterable[Save]) -> None:
        """These are computed. What is still kept of them can be offered."""
        if self._offers is None:
            return
        self._offers.take_back()
        for save in saves:
            for page in save.pages:
                if (data := self._pages.get(page.id)) is not None:
                    self._offers.offer(page, data, "")
            if save.checkpoint is not None and (state := self._states.get(save.checkpoint.id)) is not None:
                self._offers.offer(save.checkpoint, state.data, state.described)

    def withhold(self, *saves: Save) -> None:
        """These are not to be offered: their row went wrong."""
        pages = (page for save in saves for page in (*save.pages, save.checkpoint))
        if self._offers is not None:
            self._offers.withhold(page.id for page in pages if page is not None)

    def restore(self, restore: Restore, room: int = 0) -> list[Any]:
        """Caches of one request that begins with these pages, with room for so many tokens.

        Raises:
            KeyError: one of them is not here; it counts as spoiled.
            Exception: they make no caches; all of them count as spoiled.
        """
        missing = [page.id for page in restore.pages if page.id not in self._pages]
        checkpoint = restore.checkpoint
        if checkpoint is not None and checkpoint.id not in self._states:
            missing.append(checkpoint.id)
        if missing:
            self._spoiled.update(missing)
            raise KeyError(missing[0])
        pages = [(self._pages[page.id], page.tokens) for page in restore.pages]
        state = self._states[checkpoint.id] if checkpoint is not None else None
        try:
            return self._format.restore(pages, restore.tokens, state, room=room)
        except Exception:
            self.distrust(restore)
            raise

    def spoil(self, *saves: Save) -> None:
        """What was to be saved here is not to be used."""
        for save in saves:
            self._spoil(*save.pages, save.checkpoint)

    def distrust(self, restore: Restore) -> None:
        """A row that began with these pages went wrong: they are not to be used again."""
        self._spoil(*restore.pages, restore.checkpoint)

    def _spoil(self, *pages: Page | None) -> None:
        ids = [page.id for page in pages if page is not None]
        self._spoiled.update(ids)
        self.drop(ids)

    def take_spoiled(self) -> frozenset[int]:
        """Pages and checkpoints that are not here though they should be, since last asked."""
        spoiled = frozenset(self._spoiled)
        self._spoiled.clear()
        return spoiled

    def clear(self) -> None:
        self._pages.clear()
        self._states.clear()
        if self._offers is not None:
            self._offers.clear()
        self._nbytes = 0


def _arrays_of(parts: Sequence[memoryview]) -> list[mx.array | None]:
    """uint8 `[bytes]` each; None for one that cannot be made."""
    if parts and (way := transfer()) is not None:
        try:
            return [*way.filled(parts)]
        except Exception as error:
            log.warning("pages from the disk take the slow way to the device: %s", error)
    return [*map(_array_of, parts)]


def _array_of(data: memoryview) -> mx.array | None:
    """Not with the type said: each number would be converted, seven times as slow."""
    try:
        return mx.array(data.cast("B")) if data.nbytes else mx.zeros((0,), dtype=mx.uint8)  # type: ignore[arg-type]
    except Exception:
        return None
