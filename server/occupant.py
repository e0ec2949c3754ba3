"""Who listens on a port that is wanted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

_LISTENING = "0A"
"""`TCP_LISTEN`, in /proc/net/tcp (Linux, Documentation/networking/proc_net_tcp.rst)."""
PROBE_S = 2.0


def occupant(port: int) -> str:
    """In words; as far as this process is allowed to know."""
    who = _by_proc(port) or _by_lsof(port)
    if answers_as_chairlift(port):
        return f"a Chairlift server{f' ({who})' if who else ''}"
    return who or "another process"


def answers_as_chairlift(port: int) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=PROBE_S, trust_env=False)
        told = answer.json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(told, dict) and told.get("status") in ("ready", "loading", "draining", "stalled")


def _by_proc(port: int, proc: Path = Path("/proc")) -> str | None:
    inodes = set(_inodes(port, proc))
    if not inodes:
        return None
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        name = (process / "comm").read_text().strip()
                        return f"{name}, pid {process.name}"
    return None


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{columns[9]}]"


def _by_lsof(port: int) -> str | None:
    program = shutil.which("lsof")
    if program is None:
        return None
    command = [program, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^p(\d+)\nc(.*)$", said, re.MULTILINE)
    return f"{found[2]}, pid {found[1]}" if found else None
