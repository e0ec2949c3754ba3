"""What a service is, before it is written in a supervisor's language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

STOP_S = 180
"""Seconds from the signal to stop to the kill: running answers finish, and a large model is freed. launchd's
own are 5, after which memory that was wired may stay so until the machine starts again."""
RESTART_S = 30
"""Seconds between two starts."""
GAVE_UP = 78
"""Exit code of a service that has given up, where its supervisor is told not to start it again after that
(`EX_CONFIG` of sysexits.h). Elsewhere it is 0."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A file of secrets that the supervisor hands to the service, whose user could not read it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """All paths are absolute: neither launchd nor systemd expands `~` or knows where the operator stood."""

    name: str
    """Of several services on one machine; `chairlift` where there is one."""
    program: tuple[str, ...]
    """The interpreter, and what runs the service: everything before the flags of `chairlift serve`."""
    serve: tuple[str, ...]
    """Flags of `chairlift serve`. No secrets: definitions are readable by everyone."""
    system: bool
    """Started when the machine does, not when its user logs in."""
    user: str | None
    """Whom a system's service runs as; None is a user made for it (systemd only)."""
    home: Path
    working_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Whole: nothing comes from the operator's shell."""
    output: Path | None = None
    """File of standard output and error; None is the supervisor's own log."""
    folders: tuple[Path, ...] = ()
    """That the service writes to; made when it is installed. Where all else is read-only, these are not."""
    credentials: tuple[Credential, ...] = ()
    open_files: int = 10_240
    low_port: bool = False
    """It listens on a port below 1024, which needs a right of its own on Linux."""
    stop_s: int = STOP_S
    watchdog_s: float = 0.0
    """Seconds without a sign of life after which the supervisor ends it; 0: never."""
    before: tuple[str, ...] = ()
    """A command that is run first, with all rights; what comes of it does not matter."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.program, *self.serve)
