"""The servers that `compare.py` measures, and how one is started and ended.

A further server is one more `Peer` in `PEERS`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from machine import blas_library, package_version

START_SECONDS = 300.0
"""A server that is not ready by then has failed."""
POLL_SECONDS = 0.1
STOP_SECONDS = 30.0


class CompareError(Exception):
    """The comparison cannot be made. One line."""


@dataclass(frozen=True)
class Peer:
    """One server to measure."""

    name: str
    package: str
    """The distribution that it comes in; a peer that is not installed is left out."""
    command: Callable[[Path, int], list[str]]
    """Of a model folder and a port, the command line that serves it on 127.0.0.1."""
    ready_path: str
    """Answers 200 once the server is ready."""
    model: str | None
    """What requests ask for; None takes the first of `/v1/models`."""

    @property
    def installed(self) -> bool:
        return package_version(self.package) is not None


PEERS = (
    Peer(
        name="chairlift",
        package="chairlift",
        command=lambda folder, port: [
            *(sys.executable, "-m", "chairlift", "serve"),
            *("--model", str(folder), "--host", "127.0.0.1", "--port", str(port)),
        ],
        ready_path="/health/ready",
        model=None,
    ),
    Peer(
        name="mlx_lm.server",
        package="mlx-lm",
        command=lambda folder, port: [
            *(sys.executable, "-m", "mlx_lm", "server", "--log-level", "WARNING"),
            *("--model", str(folder), "--host", "127.0.0.1", "--port", str(port)),
        ],
        ready_path="/health",
        model="default_model",
    ),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    variables = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    library = blas_library()
    if library is not None:
        variables["LD_PRELOAD"] = library
    return variables


@contextmanager
def serving(peer: Peer, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """(process, URL, seconds until ready); the process is ended, by its own id, on the way out.

    Raises:
        CompareError: the server ended or was not ready in time; with the end of what it printed.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            peer.command(folder, port), stdout=log, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            wait_until_ready(peer, process, url, log)
            yield process, url, time.monotonic() - started
        finally:
            stop(process)


def wait_until_ready(peer: Peer, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CompareError(f"{peer.name} ended with code {process.returncode}: {last_line(log)}")
            try:
                if client.get(url + peer.ready_path).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            time.sleep(POLL_SECONDS)
    raise CompareError(f"{peer.name} was not ready within {START_SECONDS:g} s: {last_line(log)}")


def last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def peak_memory(pid: int) -> int | None:
    """`VmHWM` of Linux's /proc, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None
