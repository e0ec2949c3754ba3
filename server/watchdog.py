"""Ends a process that no longer gets on, so that its supervisor starts another.

A step of the model that never comes back cannot be interrupted, and neither can an event loop that hangs; all
that is left is to leave. So a thread of its own looks at both. Time counts while nothing moves: a long prompt
is many steps, each of which is a sign of life, and before the server is ready nothing is watched. Time in
which the whole process stood still does not count, as by Ctrl-Z or in a container that is paused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

LOOKS = 8
"""Times that the thread looks within the limit."""
MOST_S = 15.0
"""Seconds between two looks, at most."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What the event loop last said of itself."""

    at: float
    stalled_s: float
    """How long the model's longest step had been running then; 0 between steps."""

    def silence_s(self, now: float) -> float:
        """Seconds for which nothing has moved, on the loop or in a step."""
        age = now - self.at
        return age if self.stalled_s <= 0 else age + self.stalled_s


class Watchdog:
    """Watches from `start` until `stop`, both called on the event loop.

    Args:
        stalled_s: read on the event loop; see `Beat`.
        limit_s: seconds of silence that are too many.
        expired: called on the watching thread with a line that says what does not move. It is to end the
            process.
        looked: called on the watching thread at each look that finds all well.
        every_s: seconds between two looks at most; fewer where the limit asks for it.
    """

    def __init__(
        self,
        stalled_s: Callable[[], float],
        limit_s: float,
        expired: Callable[[str], None],
        *,
        looked: Callable[[], None] = lambda: None,
        every_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self.every_s = min(every_s, limit_s / LOOKS)
        self._stalled_s = stalled_s
        self._expired = expired
        self._looked = looked
        self._clock = clock
        self._beat = Beat(clock(), 0.0)
        self._looked_at = self._awake_since = clock()
        self._ended = threading.Event()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._take_beat()
        self._looked_at = self._awake_since = self._clock()
        self._beating = asyncio.create_task(self._beat_on(), name="chairlift watchdog")
        # In this context: who hears complaints is said there.
        watch = partial(copy_context().run, self._watch)
        threading.Thread(target=watch, name="chairlift-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.cancel()

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            self._take_beat()

    def _take_beat(self) -> None:
        self._beat = Beat(self._clock(), self._stalled_s())

    def _watch(self) -> None:
        while not self._ended.wait(self.every_s):
            self.look()

    def look(self) -> None:
        """Once."""
        beat, now = self._beat, self._clock()
        if now - self._looked_at > self.limit_s / 2:  # this thread stood still, too
            self._awake_since = now
        self._looked_at = now
        silence = min(beat.silence_s(now), now - self._awake_since)
        if silence <= self.limit_s:
            self._looked()
            return
        # A loop that turns has said something lately.
        hangs = beat.stalled_s <= 0 or now - beat.at > self.limit_s / 2
        what = "The event loop hangs" if hangs else "The model does not come back from a step"
        self._expired(f"{what}: nothing has moved for {silence:.0f} seconds. The watchdog ends the process.")
