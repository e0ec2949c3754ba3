"""What `chairlift doctor` finds out about this machine and what is installed. Loads no model."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from chairlift.cache.mlx_lm_batching import MENDS
from chairlift.engine.models.folders import cache_folder
from chairlift.patches import MLX, MLX_LM, MLX_VLM, PATCHES, apply_patches

PACKAGES = ("chairlift", "mlx", "mlx-lm", "mlx-vlm", "mlx-embeddings", "transformers")
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Change:
    """A patch or mend of an upstream package. `state`: applied, not applied, on demand. `why`: one line."""

    name: str
    upstream: str
    state: str
    why: str


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
        openblas=_openblas() if backend == "CPU" and sys.platform == "linux" else None,
        cache_folder=folder,
        cache_bytes=_bytes_below(folder),
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
        if seen.get(patch.name) is False:
            why += f" (not seen in {patch.upstream} {patch.installed}: the patch may be needless)"
        changes.append(Change(patch.name, patch.upstream, state, why))
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


def _openblas() -> bool | None:
    """Whether the library is mapped into this process; None where that cannot be told."""
    try:
        # numpy brings a library of its own, libscipy_openblas, which mlx does not use.
        return "/libopenblas" in _MAPS.read_text()
    except OSError:
        return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue
    return total
