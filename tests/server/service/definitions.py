"""Definitions of services, and a stand-in for the programs that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from chairlift.server.service.commands import PATIENCE_S, Ran
from chairlift.server.service.definition import ServiceDefinition

HOME = Path("/Users/ada")


def definition(**changes: Any) -> ServiceDefinition:
    given: dict[str, Any] = {
        "name": "chairlift",
        "program": ("/opt/lift/bin/python", "-P", "-m", "chairlift", "service", "run", "--"),
        "serve": ("--model", "/models/a b", "--port", "9000"),
        "system": False,
        "user": None,
        "home": HOME,
        "working_folder": HOME / "state",
        "environment": {"HOME": str(HOME), "HF_HOME": "/models/hub", "PATH": "/usr/bin:/bin"},
        "output": HOME / "logs" / "out",
    }
    return ServiceDefinition(**{**given, **changes})


class Became(Exception):
    """The process would be another program now."""


class Programs:
    """Stands in for launchctl, systemctl and the like: every call has to be the next of a list, exactly."""

    def __init__(self, *expected: tuple[Sequence[str], Ran | Mapping[str, str]]) -> None:
        self._expected = list(expected)
        self.timeouts: dict[str, float] = {}
        """By the first two words of a call."""

    def expect(self, *arguments: str, code: int = 0, out: str = "", err: str = "") -> Programs:
        self._expected.append((arguments, Ran(code, out, err)))
        return self

    def run(self, arguments: Sequence[str], timeout_s: float = PATIENCE_S) -> Ran:
        assert self._expected, f"not expected: {arguments}"
        expected, ran = self._expected.pop(0)
        assert list(arguments) == list(expected)
        self.timeouts[" ".join(arguments[:2])] = timeout_s
        assert isinstance(ran, Ran)
        return ran

    def become(self, arguments: Sequence[str]) -> NoReturn:
        self.run(arguments)
        raise Became

    def done(self) -> None:
        assert self._expected == []
