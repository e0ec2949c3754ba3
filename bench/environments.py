"""Python environments of peers, below build/peers: made once, and anew when the requirements change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from peers import CompareError, Peer

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "peers"
NAMED = ("mlx", "mlx-lm", "mlx-vlm", "llama_cpp_python")
"""Packages whose versions are told beside the peer's own, where the environment holds them."""
VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def requirements(peer: Peer) -> tuple[str, ...]:
    """The peer's requirements on this system: MLX has a CPU package on Linux alone."""
    if sys.platform == "linux":
        return peer.requirements
    return tuple(each.replace("mlx[cpu]", "mlx") for each in peer.requirements)


def install(peer: Peer, environments: Path = ENVIRONMENTS) -> Path:
    """The Python of the peer's environment; this process's own for a peer that names no requirements.

    Raises:
        CompareError: it does not install; with the last thing that pip said.
    """
    if not peer.requirements:
        return Path(sys.executable)
    folder = environments / peer.name
    python = folder / "bin" / "python"
    stamp, wanted = folder / "requirements.txt", "\n".join(requirements(peer)) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *requirements(peer)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise CompareError(f"does not install: {complaint(done.stdout)}")
    stamp.write_text(wanted)
    return python


def complaint(said: str) -> str:
    """Of what pip printed, the line that tells what failed: its last error, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.partition(":")[2].strip() for line in lines if line.upper().startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1]


def versions(peer: Peer, python: Path) -> str:
    """`vllm-mlx 0.6.0 (mlx 0.32.4, mlx-lm 0.31.3)`, of the environment that `python` belongs to."""
    done = subprocess.run(
        [str(python), "-I", "-c", VERSIONS, peer.package, *NAMED], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    own = found.pop(peer.package, None)
    beside = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{peer.package} {own or 'of no known version'}" + (f" ({beside})" if beside else "")
