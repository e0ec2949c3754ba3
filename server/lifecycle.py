"""How a server gets on, told to whoever keeps it running; and its end when it no longer does."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, Protocol

from chairlift.server.notify import Notifier
from chairlift.server.watchdog import MOST_S, Watchdog

WATCHDOG_EXIT = 70
"""Exit code of a server that its watchdog ended (`EX_SOFTWARE` of sysexits.h)."""
LAST_WORDS_S = 5
"""Seconds that the watchdog's last words may take: what hangs may be whoever reads them."""
PINGS = 3
"""Signs of life within the time that a supervisor asks for."""
UNWATCHED = float("inf")

logger = logging.getLogger("chairlift.server")


class Witness(Protocol):
    """Told how a server gets on. Must be quick, and must not raise."""

    def listening(self, url: str) -> None:
        """Connections are taken; the models still load."""
        ...

    def ready(self, models: Sequence[str]) -> None:
        """Requests are answered."""
        ...

    def alive(self) -> None:
        """Now and then while it is ready, from a thread of its own: all is well."""
        ...

    def stopping(self) -> None:
        """It was told to stop; running answers finish."""
        ...

    def ended(self, code: int) -> None:
        """The process exits next, with this code."""
        ...


class Systemd:
    """As `sd_notify` has it."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier

    def listening(self, url: str) -> None:
        self._notifier.status(f"Loading; {url}")

    def ready(self, models: Sequence[str]) -> None:
        self._notifier.ready(f"Serving {', '.join(models)}" if models else "Serving")

    def alive(self) -> None:
        self._notifier.alive()

    def stopping(self) -> None:
        self._notifier.stopping()

    def ended(self, code: int) -> None:
        pass


_WITNESSES: ContextVar[tuple[Witness, ...]] = ContextVar("witnesses", default=())


@contextmanager
def witnessed(witness: Witness) -> Iterator[None]:
    """Servers that are run within are witnessed."""
    token = _WITNESSES.set((*_WITNESSES.get(), witness))
    try:
        yield
    finally:
        _WITNESSES.reset(token)


class Lifecycle:
    """One server's.

    Args:
        watchdog_s: seconds after which a server that no longer gets on is ended; 0: never.
        complain: called with one line, before that.
        exit: ends the process at once.
        alarm: ends it in so many seconds, whatever its threads do.
    """

    def __init__(
        self,
        *,
        watchdog_s: float = 0.0,
        complain: Callable[[str], None] = logger.critical,
        notifier: Notifier | None = None,
        exit: Callable[[int], NoReturn] = os._exit,
        alarm: Callable[[int], object] = signal.alarm,
    ) -> None:
        notifier = notifier or Notifier()
        self._witnesses: tuple[Witness, ...] = (Systemd(notifier), *_WITNESSES.get())
        self._asked_s = notifier.watchdog_s
        self._limit_s = watchdog_s or UNWATCHED
        self._complain = complain
        self._exit = exit
        self._alarm = alarm
        self._watchdog: Watchdog | None = None

    def listening(self, url: str) -> None:
        for witness in self._witnesses:
            witness.listening(url)

    def ready(self, models: Sequence[str], stalled_s: Callable[[], float]) -> None:
        """From now on it is watched.

        Args:
            stalled_s: how long the longest step in progress has taken; read on the event loop.
        """
        for witness in self._witnesses:
            witness.ready(models)
        every_s = MOST_S if self._asked_s is None else min(MOST_S, self._asked_s / PINGS)
        self._watchdog = Watchdog(
            stalled_s, self._limit_s, self._expired, looked=self._alive, every_s=every_s
        )
        self._watchdog.start()

    def stopping(self) -> None:
        """Still watched: a step that does not come back holds up the drain."""
        for witness in self._witnesses:
            witness.stopping()

    def ended(self) -> None:
        """The server is down, the process goes on."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def end_process(self, code: int) -> NoReturn:
        """Without waiting for the model's thread, which may be in the middle of a step or a load."""
        for witness in self._witnesses:
            witness.ended(code)
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit(code)

    def _alive(self) -> None:
        for witness in self._witnesses:
            witness.alive()

    def _expired(self, line: str) -> None:
        # The system's own: faulthandler writes with Python's lock held, so that no thread could end the wait.
        self._alarm(LAST_WORDS_S)
        self._complain(line)
        # Where every thread stands is all that is left to learn from.
        faulthandler.dump_traceback(all_threads=True)
        self.end_process(WATCHDOG_EXIT)
