"""The one thread that owns every array: it loads the model, steps it, and closes it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar, cast

from chairlift.engine.errors import EngineError

T = TypeVar("T")
NAME = "chairlift-mlx"

log = logging.getLogger(__name__)


class MLXThread:
    """Runs blocking calls one after the other on a thread of its own, awaited on the event loop.

    A daemon thread rather than an executor's: one wedged in a driver call must not keep the process from
    ending, and the interpreter joins executors' threads at exit.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """`call()` on the thread; its outcome as a future of the running loop.

        Cancelling the future does not interrupt the call; its outcome is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            value: T | None = None
            error: Exception | None = None
            try:
                value = call()
            except BaseException as raised:
                error = _without_frames(raised)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, value, error)

        self._jobs.put(job)
        return future

    async def end(self, timeout: float) -> bool:
        """End the thread after the calls already given to it; False if it has not come back in time."""
        last = self.run(_nothing)
        self._jobs.put(None)
        done, _ = await asyncio.wait({last}, timeout=timeout)
        if done:
            self._thread.join()  # at once: it has nothing left to do
        return bool(done)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the call and with it what the call holds


def on_loop(call: Callable[[], None]) -> Callable[[], None]:
    """What any thread may call, once or often, to have the running loop call this soon."""
    loop = asyncio.get_running_loop()

    def soon() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    return soon


def _nothing() -> None:
    return None


def _settle(future: asyncio.Future[T], value: T | None, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(cast(T, value))


def _without_frames(error: BaseException) -> Exception:
    """The error without its frames: they hold arrays, which must not be destroyed on another thread."""
    if not isinstance(error, EngineError):
        log.error("A call on the MLX thread raised", exc_info=error)
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        error = RuntimeError(repr(error))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
