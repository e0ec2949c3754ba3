"""The one seam to launchctl, systemctl and their like."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from chairlift.server.service.errors import ServiceFault

PATIENCE_S = 60.0
"""For a command that only hands something over to the supervisor."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a command."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def said(self) -> str:
        """What it complained of, on one line."""
        return " ".join((self.err or self.out).split())


class Commands(Protocol):
    """Runs programs of the system. Arguments are passed as they are, through no shell."""

    def run(self, arguments: Sequence[str], timeout_s: float = PATIENCE_S) -> Ran:
        """Wait for its end.

        Raises:
            ServiceFault: the program is not there, or does not end in time.
        """
        ...

    def become(self, arguments: Sequence[str]) -> NoReturn:
        """Be that program from now on, at the operator's terminal.

        Raises:
            ServiceFault: the program is not there.
        """
        ...


class SystemCommands:
    """This machine's programs."""

    def run(self, arguments: Sequence[str], timeout_s: float = PATIENCE_S) -> Ran:
        try:
            ended = subprocess.run(
                list(arguments),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except FileNotFoundError:
            raise ServiceFault(f"There is no {arguments[0]} on this machine.") from None
        except subprocess.TimeoutExpired:
            raise ServiceFault(f"{' '.join(arguments)} has not ended after {timeout_s:.0f} s.") from None
        return Ran(ended.returncode, ended.stdout, ended.stderr)

    def become(self, arguments: Sequence[str]) -> NoReturn:
        try:
            os.execvp(arguments[0], list(arguments))
        except OSError as error:
            raise ServiceFault(f"{arguments[0]} cannot be run: {error.strerror}.") from None
