"""What launchd and systemd have in common, for this project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from chairlift.server.service.definition import ServiceDefinition


@dataclass(frozen=True, slots=True)
class Seen:
    """What the supervisor says of a service."""

    installed: bool
    """It knows of it."""
    pid: int | None = None
    """None: it does not run."""
    state: str = ""
    """In the supervisor's own word."""
    last_exit: str | None = None
    """In words; None: it never ended, or that is not known."""
    starts: int | None = None
    """Since it was loaded; None where that is not told."""
    gave_up: bool = False
    """The supervisor itself starts it no more."""
    restarting: bool = False
    """It is down and will be started again in a moment."""


class Supervisor(Protocol):
    """Keeps a service running. Methods raise `ServiceFault` where the supervisor refuses."""

    name: str
    """Of the supervisor."""

    @property
    def file(self) -> Path:
        """Of the service's definition."""
        ...

    def text(self, service: ServiceDefinition) -> str:
        """The file's content."""
        ...

    def loaded(self) -> bool:
        """The supervisor knows the service."""
        ...

    def load(self) -> None:
        """Have it read the file, and start the service now and from now on by itself."""
        ...

    def forget(self) -> None:
        """Stop the service and have it forgotten; waits for its end."""
        ...

    def reread(self) -> None:
        """Its file is gone."""
        ...

    def start(self) -> None:
        """Start it, if it does not run."""
        ...

    def stop(self) -> None:
        """Stop it and wait for its end: it stays down until it is started, or the machine is."""
        ...

    def seen(self) -> Seen: ...

    def logs(self, lines: int, *, follow: bool) -> NoReturn | None:
        """Show the newest lines; None where the service keeps its logs itself."""
        ...
