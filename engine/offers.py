"""What of the kept pages goes to the disk. On the MLX thread.

Where the processor shares the device's memory, the disk is lent what is kept. On CUDA what the host reads
moves to memory that the device reaches slowly (`chairlift.cache.transfer`). So there it reads copies, which
nobody else has: of the pages of a save that it wants, side by side in few arrays, made in the step that makes
the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from chairlift.cache.pages import ALIGNMENT
from chairlift.cache.transfer import DriverError, Transfer, number
from chairlift.engine.prefix.vocabulary import Page, PageData, PageSink, ReadPage

log = logging.getLogger(__name__)

COPY_BYTES = 2**28
"""Of copies in one array, about: it is free when all of them are written."""


@dataclass(slots=True)
class _Copies:
    """Of pages that were saved together."""

    data: mx.array
    """uint8 `[bytes]`."""
    address: mx.array | None
    needed: set[int]
    """Pages, by id, that are not done with."""


class Offers:
    """
    Args:
        sink: the disk.
        apart: it gets copies.
        transfer: the way to these without moving them; None: they move when they are offered.
    """

    def __init__(self, sink: PageSink, *, apart: bool, transfer: Transfer | None = None) -> None:
        self._sink = sink
        self.apart = apart
        self._transfer = transfer
        self._lent: dict[int, mx.array] = {}
        """What the sink reads: arrays are destroyed on this thread, whoever is done with them last."""
        self._copies: dict[int, tuple[_Copies, int, int]] = {}
        """By page: where its bytes are."""
        self._offered: set[int] = set()
        self._to_come = 0
        """Bytes that are wanted and not offered yet."""
        self._behind = 0
        """Bytes that are done with, in arrays that are not."""
        self.nbytes = 0
        """Of copies."""

    @property
    def buffers(self) -> int:
        """Arrays of copies."""
        return len({id(copies) for copies, _, _ in self._copies.values()})

    def copy(self, pages: Sequence[tuple[Page, mx.array]]) -> list[mx.array]:
        """Pages of one save, that are not computed yet: the arrays to compute with them."""
        made, group, size = list[mx.array](), list[tuple[Page, mx.array]](), 0
        self.take_back()
        for page, data in pages if self.apart else ():
            if page.digest and self._sink.wants(page, self._behind + self._to_come + size + data.nbytes):
                if group and size + data.nbytes > COPY_BYTES:
                    made += self._copied(group)
                    group, size = [], 0
                group.append((page, data))
                size += data.nbytes
        return made + self._copied(group) if group else made

    def _copied(self, pages: Sequence[tuple[Page, mx.array]]) -> list[mx.array]:
        # With something behind it: one array alone would be passed on, not copied.
        data = mx.concatenate([*(data for _, data in pages), mx.zeros((ALIGNMENT,), dtype=mx.uint8)])
        address = self._transfer.address(data) if self._transfer is not None else None
        copies, at = _Copies(data, address, {page.id for page, _ in pages}), 0
        for page, each in pages:
            self._copies[page.id] = copies, at, each.nbytes
            at += each.nbytes
        self._to_come += at
        self.nbytes += data.nbytes
        return [data] if address is None else [data, address]

    def offer(self, page: Page, data: mx.array, shapes: str) -> None:
        """One that is computed."""
        if not self.apart:
            if page.digest and self._sink.wants(page, data.nbytes):
                self._lent[page.id] = data
                view = memoryview(data)  # type: ignore[arg-type]
                self._sink.offer(page, data.nbytes, partial(PageData, view, shapes))
        elif page.id in self._copies and page.id not in self._offered:
            copies, start, size = self._copies[page.id]
            try:
                read = self._reads(copies, start, size, shapes)
            except Exception:
                log.exception("a page could not be offered to the disk")
                self.withhold([page.id])
                return
            self._to_come -= size
            self._offered.add(page.id)
            self._sink.offer(page, size, read)

    def _reads(self, copies: _Copies, start: int, size: int, shapes: str) -> ReadPage:
        if self._transfer is None or copies.address is None:
            view = memoryview(copies.data)  # type: ignore[arg-type]
            return partial(PageData, view[start : start + size], shapes)
        return partial(_read, self._transfer, number(copies.address) + start, size, shapes)

    def withhold(self, ids: Iterable[int]) -> None:
        """These are not offered any more, where they have not been."""
        for id in ids:
            if id in self._copies and id not in self._offered:
                self._to_come -= self._copies[id][2]
                self._done(id)

    def take_back(self) -> None:
        """What the sink needs no longer is free."""
        for id in self._sink.returned():
            self._lent.pop(id, None)
            self._offered.discard(id)
            self._done(id)

    def _done(self, id: int) -> None:
        if (found := self._copies.pop(id, None)) is None:
            return
        copies, _, size = found
        copies.needed.discard(id)
        self._behind += size
        if not copies.needed:
            self.nbytes -= copies.data.nbytes
            self._behind -= copies.data.nbytes - ALIGNMENT

    def clear(self) -> None:
        self._lent.clear()
        self._copies.clear()
        self._offered.clear()
        self._to_come = self._behind = self.nbytes = 0


def _read(transfer: Transfer, address: int, size: int, shapes: str) -> PageData | None:
    """On a thread of the disk's."""
    try:
        return PageData(transfer.read(address, size), shapes)
    except (DriverError, MemoryError) as error:
        log.warning("a page cannot be read from the device: %s", error)
        return None
