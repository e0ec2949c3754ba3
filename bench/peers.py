"""The servers that are measured, and how one is started and ended. A further one is one more `Peer`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from machine import blas_library

START_SECONDS = 300.0
"""A server that is not ready by then has failed."""
POLL_SECONDS = 0.1
STOP_SECONDS = 30.0
SILENT = {"DO_NOT_TRACK": "1", "RAPID_MLX_TELEMETRY": "0", "GRADIO_ANALYTICS_ENABLED": "False"}
"""No server reports to its makers that it was measured."""
MODEL = "MODEL"
"""In a command, where the model's path goes."""


class CompareError(Exception):
    """The comparison cannot be made. One line."""


@dataclass(frozen=True)
class Peer:
    """One server to measure."""

    name: str
    package: str
    """The distribution that it comes in."""
    command: tuple[str, ...]
    """What to tell Python so that it serves `MODEL`; host and port go behind it."""
    ready_path: str
    """Answers 200 once the server is ready."""
    model: str | None = None
    """What requests ask for; None takes the first of `/v1/models`."""
    requirements: tuple[str, ...] = ()
    """What pip installs into the peer's own environment; none: it is in this one."""
    gguf: bool = False
    """It serves the GGUF file that the embedded model is made from, in that file's own format, rather than
    the model folder."""

    def arguments(self, model: Path, port: int) -> list[str]:
        """Of Python, so that it serves this model on 127.0.0.1."""
        command = [str(model) if part == MODEL else part for part in self.command]
        return [*command, "--host", "127.0.0.1", "--port", str(port)]


CHAIRLIFT = Peer(
    name="chairlift",
    package="chairlift",
    command=("-m", "chairlift", "serve", "--model", MODEL),
    ready_path="/health/ready",
)
MLX_LM = Peer(
    name="mlx_lm.server",
    package="mlx-lm",
    command=("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", MODEL),
    ready_path="/health",
    model="default_model",
)
MLX_VLM = Peer(
    name="mlx_vlm.server",
    package="mlx-vlm",
    command=("-m", "mlx_vlm.server", "--model", MODEL),
    ready_path="/health",
    requirements=("mlx[cpu]", "mlx-vlm==0.7.10"),
)
VLLM_MLX = Peer(
    name="vllm-mlx",
    package="vllm-mlx",
    command=("-m", "vllm_mlx.cli", "serve", MODEL, "--continuous-batching", "--offline"),
    ready_path="/health",
    requirements=("mlx[cpu]", "vllm-mlx==0.6.0"),
)
"""Without `--continuous-batching` it answers one request at a time."""
RAPID_MLX = Peer(
    name="rapid-mlx",
    package="rapid-mlx",
    command=("-m", "rapid_mlx.cli", "serve", MODEL),
    ready_path="/health",
    requirements=("mlx[cpu]", "rapid-mlx==0.16.10"),
)
LLAMA_CPP = Peer(
    name="llama-cpp-python",
    package="llama_cpp_python",
    command=(
        *("-m", "llama_cpp.server", "--model", MODEL),
        *("--n_ctx", "8192", "--interrupt_requests", "false"),
    ),
    ready_path="/v1/models",
    requirements=("llama-cpp-python[server]==0.3.36",),
    gguf=True,
)
"""Another engine on another format: a yardstick, not the same work. By default a request of its server ends
the answer before it, whence `--interrupt_requests`."""

PEERS = (CHAIRLIFT, MLX_LM, MLX_VLM, VLLM_MLX, RAPID_MLX, LLAMA_CPP)


@dataclass(frozen=True)
class Serving:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    ready_s: float
    """From the start of the process until it said that it is ready."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """`home` is an empty folder: what a server left on disk for its next start is not measured, and no
    setting of the user's own is."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    variables |= {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | SILENT
    if path := variables.get("PYTHONPATH"):
        # The server runs in `home`, so what is named from here has to be named in full.
        variables["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    library = blas_library()
    if library is not None:
        variables["LD_PRELOAD"] = library
    return variables


@contextmanager
def serving(
    peer: Peer,
    model: Path,
    *,
    python: Path = Path(sys.executable),
    more: Sequence[str] = (),
    start_seconds: float = START_SECONDS,
) -> Iterator[Serving]:
    """The peer, once it is ready; its process is ended, by its own id, on the way out.

    Args:
        more: options of the server.

    Raises:
        CompareError: the server ended or was not ready in time; with the end of what it printed.
    """
    port = free_port()
    command = [str(python), *peer.arguments(model, port), *more]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(Path(home)), cwd=home
        )
        try:
            wait_until_ready(peer, process, port, log, start_seconds)
            yield Serving(process, port, time.monotonic() - started)
        finally:
            stop(process)


def wait_until_ready(
    peer: Peer, process: subprocess.Popen[bytes], port: int, log: IO[bytes], start_seconds: float
) -> None:
    deadline = time.monotonic() + start_seconds
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CompareError(f"{peer.name} ended with code {process.returncode}: {last_line(log)}")
            try:
                if client.get(f"http://127.0.0.1:{port}{peer.ready_path}").status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            time.sleep(POLL_SECONDS)
    raise CompareError(f"{peer.name} was not ready within {start_seconds:g} s: {last_line(log)}")


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
