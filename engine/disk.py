"""Between the scheduler, which decides what is read from the disk, and the disk's threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.folders import cache_folder, unwritable
from chairlift.engine.plan import LoadedModel
from chairlift.engine.prefix.disk import QUEUE_BYTES, PrefixDisk
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PageData

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds."""
QUEUE_SHARE = 0.25
"""Of memory's bound may wait to be written: a long prompt whole, where computing it is faster. Memory has
these pages anyway, unless it drops them meanwhile."""
COPIES_SHARE = 0.5
"""At most, where they are copies."""


def require_disk(config: EngineConfig) -> None:
    """Before anything is loaded: files can be made where the configuration wants them.

    Raises:
        ModelUnavailable: they cannot.
    """
    if config.prefix_cache_disk_bytes and (why := unwritable(_folder(config))) is not None:
        raise _unusable(config, why)


def queue_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Most bytes of pages that wait to be written; 0 where none are."""
    kept = config.prefix_cache_bytes or 0
    if not (config.prefix_cache_disk_bytes and kept) or loaded.identity is None:
        return 0
    return copies_bytes(kept) if copied(loaded) else _queue_bytes(kept)


def copies_bytes(kept: int) -> int:
    """The same, of so many bytes that memory keeps, where they are copies."""
    return min(_queue_bytes(kept), int(kept * COPIES_SHARE))


def _queue_bytes(kept: int) -> int:
    return max(QUEUE_BYTES, int(kept * QUEUE_SHARE))


def copied(loaded: LoadedModel) -> bool:
    """What waits to be written is there twice (`chairlift.engine.offers`)."""
    return loaded.device is not None and not loaded.device.shared


async def open_disk(loaded: LoadedModel, config: EngineConfig) -> PrefixDisk | None:
    """The tier that the configuration asks for, ready; None where it asks for none or the model's prefixes
    are not kept.

    Raises:
        ModelUnavailable: its folder cannot be used.
    """
    if not (config.prefix_cache_disk_bytes and config.prefix_cache_bytes):
        return None
    if loaded.identity is None:
        log.warning("prefixes are not kept on the disk: it is not known what model this is")
        return None
    folder = _folder(config)
    try:
        identity = await asyncio.to_thread(loaded.identity)
        queue = queue_bytes(loaded, config)
        disk = PrefixDisk(folder, identity, config.prefix_cache_disk_bytes, queue=queue)
        await asyncio.to_thread(disk.open)
    except OSError as error:
        raise _unusable(config, error.strerror or str(error)) from error
    return disk


def _folder(config: EngineConfig) -> Path:
    return config.prefix_cache_folder or cache_folder() / "prefixes"


def _unusable(config: EngineConfig, why: str) -> ModelUnavailable:
    return ModelUnavailable(f"The prefix cache cannot be kept in {_folder(config)}: {why}.")


def prefixes_of(
    index: PrefixIndex | None, disk: PrefixDisk | None, computes: Callable[[], float | None]
) -> Prefixes:
    """What the scheduler has of both tiers. `computes`: as of `Prefixes`."""
    identity = disk.model if disk is not None else ""
    return Prefixes(index, time.monotonic, identity=identity, catalogue=disk, computes=computes)


class DiskTraffic:
    """On the event loop.

    Args:
        arrived: called after the disk has answered.
    """

    def __init__(self, disk: PrefixDisk, prefixes: Prefixes, arrived: Callable[[], None]) -> None:
        self.disk = disk
        self._prefixes = prefixes
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()

    def go_on(self) -> None:
        """Pass on what the scheduler has decided since."""
        for fetch in self._prefixes.take_fetches():
            wanted = partial(self._prefixes.wants, fetch.number)
            self.disk.fetch(fetch, wanted, partial(self._done, fetch.number))
        self.disk.used(self._prefixes.take_used())
        self.disk.discard(self._prefixes.take_distrusted())

    async def clear(self) -> int:
        """Delete the model's files; returns their bytes. What cannot be deleted within `PATIENCE` goes when
        it can."""
        before = self.disk.stats.bytes
        self.disk.clear()
        await asyncio.to_thread(self.disk.settle, PATIENCE)
        return max(0, before - self.disk.stats.bytes)

    def _done(self, number: int, data: Mapping[bytes, PageData]) -> None:
        """On a thread of the disk's."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._take, number, data)

    def _take(self, number: int, data: Mapping[bytes, PageData]) -> None:
        self._prefixes.fetched(number, data)
        self._arrived()
