"""How much memory the prepared images of all requests hold together."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np

from chairlift.engine.errors import QueueFull
from chairlift.engine.media import PreparedMedia

RETRY_AFTER_S = 5.0


class MediaBudget:
    """Bytes of arrays that live, from when they are counted to when nobody holds them any more: a request may
    wait in the queue with hundreds of megabytes of pixels.

    Args:
        limit: bytes. One request alone may exceed it: its size is bounded by the model's context.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        # Arrays may be freed at any moment of any thread; appending to a deque is safe there.
        self._freed: deque[int] = deque()

    def used(self) -> int:
        while self._freed:
            self._used -= self._freed.popleft()
        return self._used

    def take(self, media: PreparedMedia) -> None:
        """Count a request's arrays; call it on the event loop.

        Raises:
            QueueFull: they do not fit beside those of others.
        """
        arrays = list(_arrays(media.inputs.values()))
        size = sum(array.nbytes for array in arrays)
        used = self.used()
        if used and used + size > self._limit:
            raise QueueFull(
                "The images of requests in progress fill the memory set aside for them.", RETRY_AFTER_S
            )
        self._used += size
        for array in arrays:
            weakref.finalize(array, self._freed.append, array.nbytes).atexit = False


def _arrays(values: Iterable[object]) -> Iterable[np.ndarray]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(value)
