"""Reading the log of requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.settings import ServerSettings

Line = dict[str, object]
LOGGING = ServerSettings(observe=ObserveSettings(access_log=True))
FIELDS = (
    *("request_id", "answer_id", "trace_id", "method", "route", "path", "status", "client", "key", "model"),
    *("stream", "answers", "prompt_tokens", "cached_tokens", "output_tokens", "queue_s", "ttft_s", "itl_s"),
    *("finish_reason", "total_s", "disconnected", "error", "error_param", "error_message", "body"),
)


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({name: vars(record)[name] for name in FIELDS if name in vars(record)})
        self.levels.append(record.levelno)


@contextmanager
def request_lines(level: int = logging.INFO) -> Iterator[Collected]:
    """What the log of requests is told meanwhile."""
    access, collected = logging.getLogger("chairlift.access"), Collected()
    before = access.level, access.propagate
    access.setLevel(level)
    access.propagate = False
    access.addHandler(collected)
    try:
        yield collected
    finally:
        access.removeHandler(collected)
        access.level, access.propagate = before
