"""`chairlift serve` as its user starts it: a process of its own, and what its machine sees of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

MODEL = "SmolLM2-135M-Instruct"
COMMAND = str(Path(sys.executable).with_name("chairlift"))
PATIENCE = 600.0
"""Seconds after which an answer or an exit that does not come fails the test."""


@dataclass(frozen=True)
class Served:
    """A server that is ready, or was."""

    process: subprocess.Popen[str]
    url: str
    announced: str
    """Everything it said on its standard output until it was ready."""
    log: IO[str]
    """Its standard error."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def complaints(self) -> str:
        """Its standard error so far, but for what became of models and of it. A good server says nothing
        there."""
        self.log.seek(0)
        return "".join(line for line in self.log if '"chairlift.lifecycle"' not in line)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for its end."""
        return self.process.wait(PATIENCE)

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(said.stdout) * 1024


@contextmanager
def started(command: Sequence[str], ready: str, **how: Any) -> Iterator[Served]:
    """A server that has told its URL, killed at the end where it still runs.

    Args:
        ready: begins the last line that it says before it serves.
        how: of `subprocess.Popen`.
    """
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, **how
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = ""
            for line in process.stdout:
                said += line
                if line.startswith(ready):
                    break
            found = re.search(r"http://[\w.:]+", said)
            served = Served(process, found[0] if found else "", said, log)
            assert found, served.complaints
            yield served
        finally:
            process.kill()


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    """A server of the embedded model on a free port, fetched first where this machine does not have it."""
    with started([COMMAND, "serve", "--port", "0", "--no-access-log", *options], "curl ") as served:
        assert httpx.get(f"{served.url}/health/ready", timeout=PATIENCE).status_code == 200
        yield served
