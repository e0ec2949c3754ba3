"""How a service is doing."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chairlift.server.service.exits import code_in_words
from chairlift.server.service.operations import Service
from chairlift.server.service.readiness import probe
from chairlift.server.service.record import Record, Run

RUNNING, DOWN, ABSENT = 0, 3, 4
"""Exit codes as the LSB has them for the status of services; 1 is for one that runs and is not ready."""
NOT_READY = 1
KILLED = "killed, or the machine went down"


@dataclass(frozen=True, slots=True)
class Status:
    """What is not known is None.

    Attributes:
        state: ready, loading, draining, stalled, silent, starting, restarting, stopped, gave up or not
            installed.
        uptime_s: of the process.
        last_exit: how an earlier process ended, in words; with the server's own where it said any.
        failures: starts in a row that failed.
        log: file of the server's log.
    """

    name: str
    supervisor: str
    definition: Path
    state: str
    code: int
    pid: int | None = None
    uptime_s: float | None = None
    url: str | None = None
    models: tuple[str, ...] = ()
    last_exit: str | None = None
    gave_up: str | None = None
    failures: int = 0
    starts: int | None = None
    log: Path | None = None

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def status(service: Service, now: float, ask: Callable[[str], str | None] = probe) -> Status:
    """Raises: ServiceFault: the supervisor does not answer."""
    supervisor = service.supervisor
    seen, record = supervisor.seen(), service.record.read()
    run = record.run if record.run is not None and record.run.pid == seen.pid else None
    if seen.pid is None:
        gave_up = record.gave_up or (seen.last_exit if seen.gave_up else None)
        state, code = ("gave up" if gave_up else "restarting" if seen.restarting else "stopped"), DOWN
        if not (seen.installed or supervisor.file.exists()):
            state, code = "not installed", ABSENT
    else:
        gave_up = None
        state = "starting" if run is None or run.url is None else ask(run.url) or "silent"
        code = RUNNING if state == "ready" else NOT_READY
    return Status(
        name=service.name,
        supervisor=supervisor.name,
        definition=supervisor.file,
        state=state,
        code=code,
        pid=seen.pid,
        uptime_s=max(0.0, now - run.started) if run is not None else None,
        url=run.url if run is not None else None,
        models=run.models if run is not None else (),
        last_exit=_last_exit(record, running=seen.pid is not None, told=seen.last_exit),
        gave_up=gave_up,
        failures=record.failures,
        starts=seen.starts,
        log=service.places.log(service.name),
    )


def _last_exit(record: Record, *, running: bool, told: str | None) -> str | None:
    """The supervisor knows signals, the record knows reasons.

    Args:
        told: by the supervisor.
    """
    run: Run | None = record.previous if running else record.run
    if run is None:
        return told
    if run.ended is None:
        # It was killed, and no other run has noted that yet.
        return told or KILLED
    ended = run.ended
    if ended.code is None:
        words = told if told is not None and "killed" in told else KILLED
    else:
        words = code_in_words(ended.code)
    if ended.reason:
        words += f": {ended.reason}" if ":" not in words else f" ({ended.reason})"
    return f"{words}, {_time(ended.at)}"


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def duration(seconds: float) -> str:
    """As people read it: the two largest units."""
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def lines(found: Status) -> list[tuple[str, str]]:
    """Titles and texts, what is not known left out."""
    shown: list[tuple[str, object]] = [
        ("service", f"{found.name} ({found.supervisor}, {found.definition})"),
        ("state", found.state + (f": {found.gave_up}" if found.gave_up else "")),
        ("pid", found.pid),
        ("up", duration(found.uptime_s) if found.uptime_s is not None else None),
        ("url", found.url),
        ("models", ", ".join(found.models)),
        ("starts", f"{found.failures} failed in a row" if found.failures else None),
        ("last exit", found.last_exit),
        ("log", found.log),
    ]
    return [(title, str(text)) for title, text in shown if text not in (None, "")]
