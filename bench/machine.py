"""What a measurement was made on, without anything that names the machine."""

from __future__ import annotations

import ctypes.util
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def blas_library() -> str | None:
    """The OpenBLAS to preload on Linux, where mlx's CPU wheel is linked to the slow reference BLAS."""
    return ctypes.util.find_library("openblas") if sys.platform == "linux" else None


def machine() -> str:
    """Cores, memory and processor, and nothing that names the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    blas = "OpenBLAS preloaded" if blas_library() else "BLAS as mlx links it"
    return (
        f"{platform.system()} {platform.machine()}, {cores} cores ({processor()}), {memory / 2**30:.0f} GiB, "
        f"{blas}, Python {platform.python_version()}"
    )


def measured_on(commit: str | None, *packages: str) -> str:
    """What a section of RESULTS.md says of a run in this process: the device, versions and the commit."""
    import mlx.core as mx  # here, as comparing servers needs none

    device = machine() if mx.default_device() == mx.cpu else str(mx.device_info()["device_name"])
    versions = ", ".join(f"{name} {package_version(name)}" for name in ("mlx", *packages))
    return f"{device}, {versions}; chairlift {revision(commit)}."


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        )
    return platform.processor() or "unknown processor"


def revision(given: str | None = None) -> str:
    """The commit measured, as told or as git knows it, then marked where tracked files differ from it."""

    def git(*command: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *command], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    if given:
        return given
    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "an unknown revision"
