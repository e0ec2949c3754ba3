"""A gate for a thread, so that a test decides when it goes on."""

from __future__ import annotations

import threading

PATIENCE = 10.0
"""Seconds after which a gate that nobody opens fails the test instead of hanging it."""


class Gate:
    """Where a thread waits while it is closed. For one thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._passes = 0
        self._standing = False

    def close(self) -> None:
        with self._changed:
            self._closed, self._passes = True, 0

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def let_one_through(self) -> None:
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def go(self) -> None:
        """Pass, now or when it is allowed."""
        with self._changed:
            self._standing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._closed or self._passes)
            self._passes -= self._closed
            self._standing = False

    def wait(self) -> bool:
        """Until the thread stands at the closed gate; False if it does not come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._standing and not self._passes, PATIENCE)
