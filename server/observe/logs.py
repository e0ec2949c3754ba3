"""How the log is written: one JSON object a line, or words for people; uvicorn's, too."""

from __future__ import annotations

import json
import logging
import sys

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from chairlift.server.configuration.types import LogFormat
from chairlift.server.observe.record import CURRENT


class RequestContext(logging.Filter):
    """Says of each message which request it came of, if it did."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id") and (request := CURRENT.get()) is not None:
            record.request_id = request.request_id
        return True


class JSONLines(JsonFormatter):
    """`timestamp` (UTC), `level`, `logger`, `message`, then the message's own fields and `exc_info`."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp=True,
            reserved_attrs=[*RESERVED_ATTRS, "taskName", "color_message"],
        )


class PrettyLines(logging.Formatter):
    """The message, then its own fields as `name=value`."""

    _known = frozenset((*RESERVED_ATTRS, "taskName", "color_message"))

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in self._known}
        return " ".join([super().formatMessage(record), *(f"{key}={_word(fields[key])}" for key in fields)])


def _word(value: object) -> str:
    """Without spaces or line breaks, unless in quotes."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def set_up_logging(
    level: str,
    kind: LogFormat = LogFormat.AUTO,
    *,
    access_log: bool = False,
    file: logging.Handler | None = None,
) -> None:
    """For the whole process: messages of this level and above are written; those of requests are, or are not.
    What becomes of models and of the server is told with warnings, though it is none.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        file: where they go in place of standard error.
    """
    handler = logging.StreamHandler() if file is None else file
    if kind is LogFormat.AUTO:
        kind = LogFormat.PRETTY if file is None and sys.stderr.isatty() else LogFormat.JSON
    handler.setFormatter(JSONLines() if kind is LogFormat.JSON else PrettyLines())
    handler.addFilter(RequestContext())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    lines = min(logging.INFO, logging.getLogger().level) if access_log else logging.CRITICAL
    logging.getLogger("chairlift.access").setLevel(lines)
    told = logging.getLogger().level
    if told <= logging.WARNING:
        told = min(logging.INFO, told)
    logging.getLogger("chairlift.lifecycle").setLevel(told)
