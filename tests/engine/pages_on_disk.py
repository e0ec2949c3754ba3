"""Pages made up for tests of the disk: their content follows from their name."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from chairlift.engine.prefix.chain import Chain, checkpoint_digest, root_digest
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.fetch import Fetch
from chairlift.engine.prefix.vocabulary import Page, PageData

BLOCK = 4
MODEL = "0" * 32


def chain_of(*tokens: int, root: bytes | None = None) -> Chain:
    return Chain(root or root_digest(), BLOCK, tokens)


def pages_of(chain: Chain, *, first_id: int = 1) -> list[Page]:
    names = [chain.root, *chain.digests(len(chain) // BLOCK)]
    return [Page(first_id + at, at * BLOCK, BLOCK, names[at + 1], names[at]) for at in range(len(names) - 1)]


def checkpoint_of(page: Page, id: int = 1000) -> Page:
    return Page(id, page.start + page.tokens, 0, checkpoint_digest(page.digest), page.digest)


def content(page: Page, size: int = 1000) -> PageData:
    """Bytes that no other page has."""
    block = hashlib.sha256(page.digest).digest()
    shapes = "" if page.tokens else f'[["uint8",{size}]]'
    return PageData(memoryview((block * (size // 32 + 1))[:size]), shapes)


def opened(
    folder: Path,
    limit: int = 10**6,
    model: str = MODEL,
    clock: Callable[[], float] = time.time,
    queue: int = 10**6,
) -> PrefixDisk:
    disk = PrefixDisk(folder, model, limit, queue=queue, clock=clock)
    disk.open()
    return disk


def offer(disk: PrefixDisk, pages: Iterable[Page], size: int = 1000) -> list[int]:
    """As the runner does it; the ids of those that were wanted."""
    wanted = []
    for page in pages:
        if disk.wants(page, size):
            wanted.append(page.id)
            disk.offer(page, size, partial(content, page, size))
    return wanted


def write(disk: PrefixDisk, pages: Iterable[Page], size: int = 1000) -> list[int]:
    wanted = offer(disk, pages, size)
    assert disk.settle(10)
    return wanted


def read(disk: PrefixDisk, pages: Iterable[Page]) -> dict[bytes, PageData]:
    """As a fetch gives them."""
    found: list[dict[bytes, PageData]] = []
    done = threading.Event()

    def take(data: object) -> None:
        assert isinstance(data, dict)
        found.append(data)
        done.set()

    disk.fetch(Fetch(1, tuple(pages), 0), lambda: True, take)
    assert done.wait(10) and len(found) == 1
    return found[0]


def same(page: Page, data: PageData, size: int = 1000) -> bool:
    expected = content(page, size)
    return bytes(data.data) == bytes(expected.data) and data.shapes == expected.shapes
