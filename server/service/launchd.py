"""launchd through launchctl(1): a job is bootstrapped into a domain and booted out of it.

`launchctl stop` and `start` are not used: what is stopped by them, KeepAlive starts again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from chairlift.server.service.commands import Commands, Ran
from chairlift.server.service.definition import STOP_S, ServiceDefinition
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.exits import code_in_words, signal_in_words
from chairlift.server.service.launchd_plist import label, plist
from chairlift.server.service.supervisor import Seen

LAUNCHCTL = "/bin/launchctl"
AGENTS, DAEMONS = Path("Library/LaunchAgents"), Path("/Library/LaunchDaemons")
GRACE_S = 30.0
"""Beyond the time that the service has to stop."""
POLL_S = 0.2

_ENTRY = re.compile(r"^\t([a-z][a-z ]*?) = (.*)$", re.MULTILINE)
"""A line of `launchctl print` that belongs to the job itself: one tab deep. Apple promises no form, so that
whatever is not found there counts as unknown."""


class Launchd:
    """
    Args:
        name: of the service.
        system: the system's domain, for root only; else that of a user's graphical session.
        home: where a user's agents lie.
        uid: the user's.
        stop_s: how long the service may take to stop.
    """

    name = "launchd"

    def __init__(
        self,
        commands: Commands,
        *,
        name: str,
        system: bool,
        home: Path,
        uid: int,
        stop_s: float = STOP_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._commands = commands
        self._label = label(name)
        self._system = system
        self._folder = DAEMONS if system else home / AGENTS
        self._domain = "system" if system else f"gui/{uid}"
        self._target = f"{self._domain}/{self._label}"
        self._patience = stop_s + GRACE_S
        self._clock, self._pause = clock, pause

    @property
    def file(self) -> Path:
        return self._folder / f"{self._label}.plist"

    def text(self, service: ServiceDefinition) -> str:
        return plist(service).decode()

    def loaded(self) -> bool:
        return self._print() is not None

    def load(self) -> None:
        # A job that was disabled once stays so, also when its file is written anew.
        self._must("enable", self._target)
        self._must("bootstrap", self._domain, str(self.file))

    def forget(self) -> None:
        """`bootout` may return before the process has ended, and says then that it is still at it (36)."""
        if not self.loaded():
            return
        ran = self._launchctl("bootout", self._target, timeout_s=self._patience)
        until = self._clock() + self._patience
        while self.loaded():
            if self._clock() > until:
                raise ServiceFault(
                    f"{self._label} does not stop: launchctl bootout said {ran.said or ran.code}"
                )
            self._pause(POLL_S)

    def reread(self) -> None:
        """launchd reads files only when it is told to."""

    def start(self) -> None:
        if self.loaded():
            self._must("kickstart", self._target)
        else:
            self.load()

    def stop(self) -> None:
        self.forget()

    def seen(self) -> Seen:
        text = self._print()
        if text is None:
            return Seen(installed=False)
        entries = dict(reversed(_ENTRY.findall(text)))
        return Seen(
            installed=True,
            pid=_number(entries.get("pid")),
            state=entries.get("state", ""),
            last_exit=_last_exit(entries),
            starts=_number(entries.get("runs")),
            restarting=entries.get("state") == "spawn scheduled",
        )

    def logs(self, lines: int, *, follow: bool) -> None:
        return None

    def _print(self) -> str | None:
        """None: launchd does not know the job."""
        ran = self._launchctl("print", self._target)
        return ran.out if ran.code == 0 else None

    def _must(self, *arguments: str) -> None:
        ran = self._launchctl(*arguments)
        if ran.code != 0:
            raise ServiceFault(self._refusal(arguments[0], ran))

    def _launchctl(self, *arguments: str, timeout_s: float = 60.0) -> Ran:
        return self._commands.run([LAUNCHCTL, *arguments], timeout_s)

    def _refusal(self, verb: str, ran: Ran) -> str:
        message = f"launchctl {verb} failed ({ran.code}): {ran.said or 'no reason given'}"
        if self._system:
            return message
        return (
            f"{message}. An agent needs its user's graphical session; for a machine nobody logs in to, "
            "use --system."
        )


def _last_exit(entries: dict[str, str]) -> str | None:
    if (number := _number(_after_colon(entries.get("last terminating signal")))) is not None:
        return signal_in_words(number)
    code = _number(entries.get("last exit code"))
    return None if code is None else code_in_words(code)


def _after_colon(text: str | None) -> str | None:
    """The number in `Killed: 9`."""
    return None if text is None else text.rpartition(":")[2].strip()


def _number(text: str | None) -> int | None:
    found = re.match(r"-?\d+", text or "")
    return int(found[0]) if found else None
