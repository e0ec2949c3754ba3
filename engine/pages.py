"""What the runner keeps of rows for later ones: pages and checkpoints, by id.

Which are kept and which go is decided by the scheduler's `PrefixIndex`; here they are only stored. All
methods run on the MLX thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import mlx.core as mx

from chairlift.cache.pages import PageFormat, State
from chairlift.engine.prefix.vocabulary import Load, Page, PageData, PageSink, PrefixSpec, Restore, Save
from chairlift.engine.residents import Residents

log = logging.getLogger(__name__)


class PageStore:
    """Args: pages: how the model's caches become pages; without, nothing is kept. spec: the same in sizes."""

    def __init__(self, pages: PageFormat | None = None, spec: PrefixSpec | None = None) -> None:
        self.spec = spec
        self._pages_of = pages
        self.nbytes = 0
        """Of all that is kept."""
        self._pages: dict[int, mx.array] = {}
        self._states: dict[int, State] = {}
        self._spoiled: set[int] = set()
        self._sink: PageSink | None = None
        self._lent: dict[int, mx.array] = {}
        """What the sink reads: arrays are destroyed on this thread, whoever is done with them last."""

    @property
    def _format(self) -> PageFormat:
        if self._pages_of is None:
            raise RuntimeError("Nothing is kept of this model's rows.")
        return self._pages_of

    @property
    def buffers(self) -> int:
        """Arrays of all that is kept."""
        return len(self._pages) + len(self._states)

    def drop(self, ids: Iterable[int]) -> None:
        for id in ids:
            page, state = self._pages.pop(id, None), self._states.pop(id, None)
            self.nbytes -= (page.nbytes if page is not None else 0) + (state.data.nbytes if state else 0)
        self._take_back()

    def save(self, save: Save, residents: Residents) -> list[mx.array]:
        """Keep copies of a row's state. Returns the new arrays, to evaluate; where it fails, the pages
        count as spoiled."""
        try:
            return self._save(save, residents)
        except Exception:
            log.exception("pages of row %d could not be made", save.row)
            self.spoil(save)
            return []

    def _save(self, save: Save, residents: Residents) -> list[mx.array]:
        if save.row not in residents.rows:
            self.spoil(save)
            return []
        new: list[mx.array] = []
        if save.pages:
            start, last = save.pages[0].start, save.pages[-1]
            planes = residents.planes(save.row, self._format, start, last.start + last.tokens)
            parts = [(page.start - start, page.start - start + page.tokens) for page in save.pages]
            packed = self._format.pack_many(planes, parts)
            for page, data in zip(save.pages, packed, strict=True):
                self._put(page, data)
                new.append(data)
        if save.checkpoint is not None:
            held = residents.rows[save.row].held
            if held != save.checkpoint.start:
                raise ValueError(f"The row holds {held} tokens, not {save.checkpoint.start}.")
            state = self._format.pack_state(residents.states(save.row, self._format))
            self._put(save.checkpoint, state)
            new.append(state.data)
        return new

    def _put(self, page: Page, kept: mx.array | State) -> None:
        if isinstance(kept, State):
            self._states[page.id] = kept
            self.nbytes += kept.data.nbytes
        else:
            self._pages[page.id] = kept
            self.nbytes += kept.nbytes

    def load(self, loads: Iterable[Load]) -> None:
        """Keep what comes from outside; where it is not what it should be, it counts as spoiled."""
        for load in loads:
            page, given = load.page, load.data
            try:
                data = _bytes_of(given.data)
                if not page.tokens:
                    self._put(page, self._format.state_of(data, given.shapes))
                elif data.shape == (self._format.page_bytes(page.tokens),):
                    self._put(page, data)
                else:
                    raise ValueError(f"A page of {page.tokens} tokens has {data.size} bytes.")
            except Exception:
                log.exception("a page from the disk could not be loaded")
                self._spoiled.add(page.id)

    def spill(self, sink: PageSink) -> None:
        """From now on, offer what is kept to `sink`."""
        self._sink = sink

    def landed(self, saves: Iterable[Save]) -> None:
        """These are computed. What is still kept of them can be offered."""
        if self._sink is None:
            return
        self._take_back()
        for save in saves:
            for page in save.pages:
                self._offer(page, self._pages.get(page.id), "")
            if save.checkpoint is not None and (state := self._states.get(save.checkpoint.id)) is not None:
                self._offer(save.checkpoint, state.data, state.described)

    def _take_back(self) -> None:
        for id in self._sink.returned() if self._sink is not None else ():
            self._lent.pop(id, None)

    def _offer(self, page: Page, data: mx.array | None, shapes: str) -> None:
        assert self._sink is not None
        if data is None or not page.digest or not self._sink.wants(page, data.nbytes):
            return
        self._lent[page.id] = data
        view = memoryview(data)  # type: ignore[arg-type]
        self._sink.offer(page, data.nbytes, partial(PageData, view, shapes))

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
        self._lent.clear()
        self.nbytes = 0


def _bytes_of(data: memoryview) -> mx.array:
    """uint8 `[bytes]`. Not with the type said: each number would be converted, seven times as slow."""
    return mx.array(data.cast("B")) if data.nbytes else mx.zeros((0,), dtype=mx.uint8)  # type: ignore[arg-type]
