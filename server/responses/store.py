"""The database of responses for the event loop: one thread of its own, opened at its first use."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from chairlift.server.errors import APIError
from chairlift.server.payload import Payload
from chairlift.server.responses.caller import Caller
from chairlift.server.responses.database import Bounds, ResponseDatabase, Stored, StoreFault
from chairlift.server.settings import ResponsesSettings

logger = logging.getLogger("chairlift.server")

T = TypeVar("T")

HEARTBEAT_S = 15.0
"""Seconds between two signs of life of a process that answers in the background."""
PATIENCE_S = 60.0
"""Without a sign of life for so long, what another process was answering counts as failed."""


class ResponseStore:
    """One for the life of an app. What it raises for the client says nothing about the file.

    Raises (every coroutine but `open` and `close`): APIError: 500 where the database fails.
    """

    def __init__(self, settings: ResponsesSettings) -> None:
        self.enabled = settings.keep
        self.shared = settings.path is not None
        """Other processes may use it."""
        self.owner = uuid.uuid4().hex
        """This process, among those that use the file."""
        self._settings = settings
        self._database: ResponseDatabase | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Raises: StoreFault where the file cannot be used. Without it the first use opens."""
        if self.enabled:
            await asyncio.wrap_future(self._executor.submit(self._open))

    async def close(self) -> None:
        """What was handed to it before is written first."""
        if self._thread is not None:
            await asyncio.wrap_future(self._thread.submit(self._close))
            self._thread.shutdown()
            self._thread = None

    async def put(self, id: str, stored: Stored, *, anew: bool = True) -> bool:
        """False: it is too large to be kept; or, unless `anew`, it was deleted."""
        return await self._do(lambda database: database.put(id, stored, anew=anew))

    def put_soon(self, id: str, stored: Stored) -> None:
        """For where nothing can be awaited any more; a failure is logged."""

        def put() -> None:
            try:
                self._open().put(id, stored)
            except StoreFault as fault:
                logger.error("%s", fault)

        self._executor.submit(put)

    async def get(self, id: str, caller: Caller, *, use: bool = False) -> Stored | None:
        return await self._do(lambda database: database.get(id, caller, use=use))

    async def find_items(self, ids: Sequence[str], caller: Caller) -> dict[str, Payload]:
        return await self._do(lambda database: database.find_items(ids, caller))

    async def delete(self, id: str, caller: Caller) -> bool:
        return await self._do(lambda database: database.delete(id, caller))

    async def seen(self) -> None:
        await self._do(lambda database: database.seen(self.owner))

    async def is_alive(self, owner: str) -> bool:
        return await self._do(lambda database: database.is_alive(owner, PATIENCE_S))

    async def _do(self, work: Callable[[ResponseDatabase], T]) -> T:
        try:
            return await asyncio.wrap_future(self._executor.submit(lambda: work(self._open())))
        except StoreFault as fault:
            logger.error("%s", fault)
            raise APIError(
                500, "The store of responses failed.", kind="server_error", code="store_error"
            ) from None

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "chairlift-responses")
        return self._thread

    def _open(self) -> ResponseDatabase:
        """On the thread."""
        if self._database is None:
            settings = self._settings
            bounds = Bounds(settings.max_count, settings.max_bytes, settings.max_age_s)
            self._database = ResponseDatabase(settings.path, bounds)
        return self._database

    def _close(self) -> None:
        """On the thread."""
        database, self._database = self._database, None
        if database is not None:
            database.close()
