"""Logs in a file of bounded size."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

OLD_FILES = 4
"""Kept beside the current one, as FILE.1 (the newest) to FILE.4."""


class LogFile(RotatingFileHandler):
    """Never more than `OLD_FILES` + 1 files of `size` bytes each, readable for their owner only. A full disk
    costs lines of the log, and nothing else.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=size, backupCount=OLD_FILES, encoding="utf-8", errors="replace")

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename,
            "a",
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )

    def doRollover(self) -> None:
        try:
            super().doRollover()
        except OSError:
            # Its folder is closed to us, or the next file's place is taken: the newest lines are kept, then.
            self.stream = self._open()
            self.stream.truncate(0)

    def handleError(self, record: logging.LogRecord) -> None:
        """Upstream prints a trace for each line, to a place that may be full as well."""


def newest_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, from FILE.1 where FILE has not as many; none where there is no file."""
    lines: list[str] = []
    for file in (path, path.with_name(path.name + ".1")):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [*text.splitlines(), *lines]
        if len(lines) >= count:
            break
    return lines[-count:] if count else []
