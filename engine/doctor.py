"""What `chairlift doctor` finds out about this machine and what is installed. Loads no model."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.cache.mlx_lm_batching import MENDS
from chairlift.engine.memory.device import MlxDevice
from chairlift.engine.models.folders import bytes_below, cache_folder
from chairlift.patches import MLX, MLX_LM, MLX_VLM, PATCHES, apply_patches

PACKAGES = ("chairlift", "mlx", "mlx-lm", "mlx-vlm", "mlx-embeddings", "transformers")
WIRED_LIMIT = "iogpu.wired_limit_mb"
SYSTEM_BYTES, SYSTEM_SHARE = 8 * 2**30, 0.1
"""What a system that shares its memory with the GPU is left with, at least."""
WIRED_MARGIN = 1.05
MEBIBYTE = 2**20
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Change:
    """A patch or mend of an upstream package.

    Attributes:
        state: applied, not applied, on demand, not needed.
        why: one line.
        needless: it is applied, and what it mends is not seen in what is installed.
    """

    name: str
    upstream: str
    state: str
    why: str
    needless: bool = False

    @property
    def ordinary(self) -> bool:
        """As it should be: nobody has to look at it."""
        return self.state != "not applied" and not self.needless


@dataclass(frozen=True, slots=True)
class Examination:
    """
    Attributes:
        versions: of the packages that matter; None where one is not installed.
        python: its version and the machine's architecture.
        backend: Metal, CUDA or CPU.
        device: its name.
        memory_bytes: of the device, or of the machine where they are the same; None where unknown.
        working_set_bytes: what the device may keep in use at once; None where it has no such bound.
        usable_bytes: of the memory, for a server, as a default; 0: not known.
        wired_limit_mb: of the system, for GPUs that share its memory; 0 is the system's own choice, None
            where there is no such limit.
        openblas: whether it is loaded; None where it does not matter.
        cache_folder: downloads, conversions and what else Chairlift keeps.
        cache_bytes: of the files in it.
        changes: patches, and the mends that `chairlift.cache.mamba` makes on demand.
    """

    versions: dict[str, str | None]
    python: str
    backend: str
    device: str
    memory_bytes: int | None
    working_set_bytes: int | None
    usable_bytes: int
    wired_limit_mb: int | None
    openblas: bool | None
    cache_folder: Path
    cache_bytes: int
    changes: tuple[Change, ...]


def examine() -> Examination:
    """Look at everything. Applies the patches to this process, to say what came of them."""
    backend = _backend()
    info = mx.device_info()
    folder = cache_folder()
    return Examination(
        versions={name: _version(name) for name in PACKAGES},
        python=f"{platform.python_version()} on {platform.machine()}",
        backend=backend,
        device=str(info.get("device_name") or "unknown"),
        memory_bytes=_memory(info, backend),
        working_set_bytes=_number(info, "max_recommended_working_set_size"),
        usable_bytes=MlxDevice().usable(),
        wired_limit_mb=_wired_limit_mb(),
        openblas=_openblas() if backend == "CPU" and sys.platform == "linux" else None,
        cache_folder=folder,
        cache_bytes=bytes_below(folder),
        changes=(*_patches(), *_mends()),
    )


def _patches() -> list[Change]:
    seen = {
        patch.name: patch.needed()
        for patch in PATCHES
        if patch.needed is not None and patch.fits and not patch.applied()
    }
    changes = []
    for outcome in apply_patches((MLX, MLX_LM, MLX_VLM)):
        patch = outcome.patch
        state = "applied" if outcome.applied else "not applied"
        why = outcome.why
        needless = seen.get(patch.name) is False
        if needless:
            why += f" (not seen in {patch.upstream} {patch.installed}: the patch may be needless)"
        changes.append(Change(patch.name, patch.upstream, state, why, needless))
    return changes


def _mends() -> list[Change]:
    return [
        Change(
            f"{getattr(mend.owner, '__name__', mend.owner)}.{mend.name}",
            MLX_LM,
            "applied" if mend.applied else "on demand" if mend.faulty() else "not needed",
            mend.reason,
        )
        for mend in MENDS
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend() -> str:
    if mx.default_device() == mx.cpu:
        return "CPU"
    return "CUDA" if mx.cuda.is_available() else "Metal"


def _number(info: dict[str, Any], *keys: str) -> int | None:
    return next((int(info[key]) for key in keys if info.get(key)), None)


def _memory(info: dict[str, Any], backend: str) -> int | None:
    found = _number(info, "memory_size", "total_memory")
    if found is None and backend == "CPU" and hasattr(os, "sysconf"):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def _wired_limit_mb() -> int | None:
    if sys.platform != "darwin":
        return None
    try:
        ended = subprocess.run(
            ["/usr/sbin/sysctl", "-n", WIRED_LIMIT], capture_output=True, text=True, timeout=10
        )
        return int(ended.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def wired_limit_for(needed: int, working_set: int, memory: int) -> int | None:
    """The wired limit to set, in MiB, so that a GPU may keep `needed` bytes in use; None where it may
    already, or where the system would be left with too little.

    Args:
        working_set: bytes that it may keep in use now.
        memory: of the machine.
    """
    most = memory - max(SYSTEM_BYTES, int(SYSTEM_SHARE * memory))
    wanted = int(WIRED_MARGIN * needed)
    if needed <= working_set or wanted > most:
        return None
    return -(-wanted // MEBIBYTE)


def _openblas() -> bool | None:
    """Whether the library is mapped into this process; None where that cannot be told."""
    try:
        # numpy brings a library of its own, libscipy_openblas, which mlx does not use.
        return "/libopenblas" in _MAPS.read_text()
    except OSError:
        return None
