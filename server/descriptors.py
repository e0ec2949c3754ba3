"""Connections are file descriptors, and those end: launchd starts a process with 256 of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger("chairlift.server")

ENOUGH = 8192
"""Descriptors, below the 10,240 that macOS grants a process at most."""
EXHAUSTED = "socket.accept() out of system resource"
"""What asyncio (Python 3.11 to 3.13) says, with a trace, as many times as the backlog is long."""
AGAIN = "._start_serving("
"""How it tries again a second later, each of those times, also where the socket has been closed meanwhile."""
SAY_EVERY = 60.0
"""Seconds."""


def raise_limit() -> None:
    """Ask for as many descriptors as may be had, up to `ENOUGH`."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            logger.info("The limit of open files stays at %d: %s", soft, error)


class Complaints:
    """An event loop's exception handler, which says once a minute that no descriptor is left."""

    def __init__(self) -> None:
        self._said: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context.get("message"))
        if message == EXHAUSTED:
            if self._said is None or loop.time() - self._said >= SAY_EVERY:
                self._said = loop.time()
                logger.error("No file descriptor is left: new connections wait until others close.")
        elif AGAIN not in message:
            loop.default_exception_handler(context)
