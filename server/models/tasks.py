"""Work that others wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

logger = logging.getLogger("chairlift.server")

T = TypeVar("T")


async def on_a_thread(call: Callable[[], T]) -> T:
    """On a daemon thread: what takes long must not hold up the end of the process, as an executor's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="chairlift-find", daemon=True).start()
    return await future


def log_defect(task: asyncio.Task[None]) -> None:
    """A done callback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a model could not be seen to", exc_info=error)
