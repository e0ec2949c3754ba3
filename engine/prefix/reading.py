"""Reading the files of a fetch by several threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from chairlift.engine.prefix.fetch import Fetch
from chairlift.engine.prefix.vocabulary import Page, PageData

log = logging.getLogger(__name__)

Done = Callable[[Mapping[bytes, PageData]], None]


class Reading:
    """
    Args:
        read: a page, or None where there is none.
        wanted: asked before each file; where it says no, the rest is left.
        done: called once, on the last thread to finish, with what was found.
        readers: most threads that call `go_on`, once each.
    """

    def __init__(
        self,
        fetch: Fetch,
        read: Callable[[Page], PageData | None],
        wanted: Callable[[], bool],
        done: Done,
        readers: int,
    ) -> None:
        self._read = read
        self._wanted = wanted
        self._done = done
        self._lock = threading.Lock()
        self._pages = deque(fetch.pages)
        self._found: dict[bytes, PageData] = {}
        self.readers = min(readers, len(fetch.pages))
        """Threads that are to call `go_on` and have not come to its end."""

    def go_on(self) -> None:
        """Read until nothing is left; the last thread to come there tells what was found."""
        try:
            while self._wanted():
                with self._lock:
                    if not self._pages:
                        break
                    page = self._pages.popleft()
                data = self._read(page)
                with self._lock:
                    if data is not None:
                        self._found[page.digest] = data
                    elif page.tokens:
                        self._pages.clear()  # what is behind it is of no use
        except Exception:
            log.exception("the prefix cache on the disk")
        with self._lock:
            self.readers -= 1
            last = not self.readers
        if last:
            self._done(self._found)
