"""systemd through systemctl(1) and journalctl(1): the system's manager, or a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from chairlift.server.service.commands import Commands, Ran
from chairlift.server.service.definition import STOP_S, ServiceDefinition
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.exits import code_in_words, result_in_words, signal_in_words
from chairlift.server.service.supervisor import Seen
from chairlift.server.service.systemd_unit import unit, unit_name

UNITS, SYSTEM_UNITS = Path(".config/systemd/user"), Path("/etc/systemd/system")
SHOWN = (
    "LoadState",
    "ActiveState",
    "SubState",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainExitTimestampMonotonic",
    "Result",
    "NRestarts",
)
EXITED, KILLED, DUMPED = 1, 2, 3
"""`ExecMainCode`: CLD_EXITED, CLD_KILLED and CLD_DUMPED of sigaction(2)."""
GRACE_S = 30.0


class Systemd:
    """
    Args:
        name: of the service.
        system: the system's manager, for root only; else the user's.
        home: where a user's units lie.
    """

    name = "systemd"

    def __init__(
        self, commands: Commands, *, name: str, system: bool, home: Path, stop_s: float = STOP_S
    ) -> None:
        self._commands = commands
        self._unit = unit_name(name)
        self._manager = () if system else ("--user",)
        self._folder = SYSTEM_UNITS if system else home / UNITS
        self._patience = stop_s + GRACE_S

    @property
    def file(self) -> Path:
        return self._folder / self._unit

    def text(self, service: ServiceDefinition) -> str:
        return unit(service)

    def loaded(self) -> bool:
        return self._show()["LoadState"] == "loaded"

    def load(self) -> None:
        self._must("daemon-reload")
        self._must("enable", self._unit)
        self._start()

    def forget(self) -> None:
        if self.loaded():
            self._must("disable", "--now", self._unit, timeout_s=self._patience)
        # A unit that failed is remembered without this.
        self._systemctl("reset-failed", self._unit)

    def reread(self) -> None:
        self._must("daemon-reload")

    def start(self) -> None:
        self._start()

    def stop(self) -> None:
        self._must("stop", self._unit, timeout_s=self._patience)

    def _start(self) -> None:
        """Without waiting: a unit that tells when it is ready counts as starting until then."""
        self._systemctl("reset-failed", self._unit)
        self._must("start", "--no-block", self._unit)

    def seen(self) -> Seen:
        shown = self._show()
        result = shown.get("Result", "")
        return Seen(
            installed=shown["LoadState"] == "loaded",
            pid=int(shown.get("MainPID") or 0) or None,
            state=f"{shown.get('ActiveState', '')} ({shown.get('SubState', '')})",
            last_exit=_last_exit(shown),
            starts=int(shown.get("NRestarts") or 0) + 1,
            gave_up=result == "start-limit-hit",
            restarting=shown.get("SubState") == "auto-restart",
        )

    def logs(self, lines: int, *, follow: bool) -> NoReturn:
        unit = ("--user-unit", self._unit) if self._manager else ("--unit", self._unit)
        self._commands.become(
            ["journalctl", *unit, "--lines", str(lines), *(("--follow",) if follow else ("--no-pager",))]
        )

    def _show(self) -> dict[str, str]:
        ran = self._systemctl("show", self._unit, f"--property={','.join(SHOWN)}")
        found = dict(line.split("=", 1) for line in ran.out.splitlines() if "=" in line)
        if ran.code != 0 or "LoadState" not in found:
            raise ServiceFault(f"systemctl show failed ({ran.code}): {ran.said or 'no reason given'}")
        return found

    def _must(self, *arguments: str, timeout_s: float = 60.0) -> None:
        ran = self._systemctl(*arguments, timeout_s=timeout_s)
        if ran.code != 0:
            raise ServiceFault(
                f"systemctl {arguments[0]} failed ({ran.code}): {ran.said or 'no reason given'}"
            )

    def _systemctl(self, *arguments: str, timeout_s: float = 60.0) -> Ran:
        return self._commands.run(["systemctl", *self._manager, *arguments], timeout_s)


def _last_exit(shown: dict[str, str]) -> str | None:
    if not int(shown.get("ExecMainExitTimestampMonotonic") or 0):
        return None
    if words := result_in_words(shown.get("Result", "")):
        return words
    code, status = int(shown.get("ExecMainCode") or 0), int(shown.get("ExecMainStatus") or 0)
    if code in (KILLED, DUMPED):
        return signal_in_words(status)
    return code_in_words(status) if code == EXITED else None
