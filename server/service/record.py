"""What a service notes of its runs: whether they came up, how they ended, and when to try no more.

A run that is killed notes nothing; the next finds its note without an end. All functions are pure but
`RecordFile`, which keeps the note in a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

MOST_FAILURES = 5
"""Starts in a row that may fail before the service gives up."""
SETTLED_S = 60.0
"""Seconds that a run must have been ready for its start not to count as failed."""
WRONG_USAGE = 2
"""Exit code for flags that mean nothing, which trying again does not mend."""

logger = logging.getLogger("chairlift.service")


@dataclass(frozen=True, slots=True)
class Ended:
    at: float
    """Seconds since 1970, as all times here."""
    code: int | None
    """None: it was killed, or the machine went down."""
    reason: str
    """What it complained of last; empty where it did not."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process."""

    pid: int
    started: float
    url: str | None = None
    models: tuple[str, ...] = ()
    ready: float | None = None
    """Since when; None: not yet."""
    settled: bool = False
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Record:
    failures: int = 0
    """Starts in a row that failed."""
    gave_up: str | None = None
    """Why no further start is tried."""
    run: Run | None = None
    """The current one, or the last."""
    previous: Run | None = None


def begin(record: Record, pid: int, now: float, *, most_failures: int = MOST_FAILURES) -> Record:
    """A process has been started. If `gave_up` is set in what is returned, it is to leave at once.

    After giving up, the supervisor starts nothing by itself. So a start then is the operator's or the
    machine's, and counts from zero.
    """
    if record.gave_up is not None:
        record = replace(record, failures=0, gave_up=None)
    before = record.run
    if before is not None and before.ended is None:
        before = replace(before, ended=Ended(now, None, ""))
        record = _counted(replace(record, run=before))
        if record.failures >= most_failures:
            return _given_up(record)
    return replace(record, run=Run(pid, now), previous=before)


def listening(record: Record, url: str) -> Record:
    return replace(record, run=replace(_run(record), url=url))


def ready(record: Record, models: tuple[str, ...], now: float) -> Record:
    return replace(record, run=replace(_run(record), models=models, ready=now))


def settled(record: Record) -> Record:
    """It has been ready for a while: earlier starts that failed are forgotten."""
    return replace(record, failures=0, run=replace(_run(record), settled=True))


def end(record: Record, code: int, reason: str, now: float, *, most_failures: int = MOST_FAILURES) -> Record:
    """The process is about to exit. Exit code 0 is a stop that was asked for."""
    record = replace(record, run=replace(_run(record), ended=Ended(now, code, reason)))
    if code == 0:
        return replace(record, failures=0)
    record = _counted(record)
    if record.failures and (record.failures >= most_failures or code == WRONG_USAGE):
        return _given_up(record)
    return record


def _run(record: Record) -> Run:
    assert record.run is not None, "begin comes first"
    return record.run


def _counted(record: Record) -> Record:
    return replace(record, failures=0 if _run(record).settled else record.failures + 1)


def _given_up(record: Record) -> Record:
    ended = _run(record).ended
    assert ended is not None
    why = ended.reason.rstrip(".") or ("killed" if ended.code is None else f"exit code {ended.code}")
    times = "1 start" if record.failures == 1 else f"{record.failures} starts in a row"
    return replace(record, gave_up=f"{times} failed, the last with: {why}")


_RECORD = TypeAdapter(Record)


class RecordFile:
    """A record in a JSON file that is whole at any time. A file that cannot be read is an empty record, one
    that cannot be written is complained of in the log: neither keeps a server from serving."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record:
        try:
            return _RECORD.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return Record()
        except (OSError, ValidationError) as error:
            logger.warning("%s cannot be read: %s", self.path, " ".join(str(error).split()))
            return Record()

    def write(self, record: Record) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._replace(_RECORD.dump_json(record, indent=1) + b"\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path, error.strerror or error)

    def _replace(self, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
