"""The one seam to the device's memory: how much there is, how much is in use, and MLX's own bounds."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

log = logging.getLogger(__name__)

CPU_SHARE = 0.75
"""Of a machine's memory, for a process that computes on its CPU: the system and others need some."""
GPU_SHARE = 0.9
"""Of what is free on a GPU of its own: its driver and libraries take some that MLX does not count."""
METAL_SHARE = 0.95
"""Of the working set that Metal recommends; beyond that the system begins to page."""
MAPPED_BYTES = 4 * 2**20
"""Buffers of a CPU from this size on go back to the system when MLX frees them. Of smaller ones a step of a
small model has thousands, and to map and fill a page anew takes longer than to compute it."""
KEPT_BYTES = 64 * 2**20
"""Of smaller ones that are free, the C library keeps so much at the end of its heaps."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
_LIMITS = ("memory.max", "memory.limit_in_bytes")


class MlxDevice:
    """The device that MLX computes on (`chairlift.engine.memory.vocabulary.Device`)."""

    @property
    def shared(self) -> bool:
        return mx.default_device() == mx.cpu or not mx.cuda.is_available()

    def usable(self) -> int:
        """What this process may use, as a default."""
        info = mx.device_info()
        if mx.default_device() == mx.cpu:
            limits = [limit for limit in (physical_memory(), container_limit()) if limit]
            return int(CPU_SHARE * min(limits)) if limits else 0
        if mx.cuda.is_available():
            total = int(info.get("total_memory") or 0)
            free = int(info.get("free_memory") or total)
            return int(GPU_SHARE * min(total, free + mx.get_active_memory() + mx.get_cache_memory()))
        return int(METAL_SHARE * int(info.get("max_recommended_working_set_size") or 0))

    def bound(self, total: int, cache: int) -> None:
        """Beyond `total` an allocation waits for what is under way. On Metal, as much is kept in memory."""
        mx.set_memory_limit(total)
        mx.set_cache_limit(cache)
        if mx.default_device() == mx.cpu:
            _give_back_large_buffers()
        if mx.metal.is_available():
            most = int(mx.device_info().get("max_recommended_working_set_size") or 0)
            try:
                mx.set_wired_limit(min(total, most))
            except (RuntimeError, ValueError) as error:  # macOS before 15 has no such limit
                log.info("the wired limit stays as it is: %s", error)

    def footprint(self) -> int:
        return footprint()

    def tidy(self) -> None:
        """Give back what the allocator of the process holds and nobody uses."""
        with suppress(AttributeError, OSError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def buffers_limit() -> int:
    """Most buffers, of any size, that the device lets a process have at once; 0: there is no such bound.

    Metal has one; beyond it MLX raises "Resource limit (499000) exceeded" (mlx, metal/allocator.cpp).
    """
    return int(mx.device_info().get("resource_limit") or 0)


def footprint() -> int:
    """Bytes of memory that the process has: what is resident, or on macOS what the system charges it for,
    which counts memory that a GPU shares. 0: not known."""
    if sys.platform == "darwin":
        return _phys_footprint()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def container_limit(roots: Iterable[Path] = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the process's control groups allow; None without a bound.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, "memory.max"; cgroup-v1/memory.rst.
    """
    try:
        paths = [line.rstrip("\n").split(":", 2)[2].lstrip("/") for line in own.read_text().splitlines()]
    except (OSError, IndexError):
        paths = []
    limits = []
    for root in roots:
        folders = {root, *(folder for path in paths for folder in _upwards(root, root / path))}
        for file in (folder / name for folder in folders for name in _LIMITS):
            try:
                limits.append(int(file.read_text()))
            except (OSError, ValueError):  # not there, or "max"
                continue
    physical = physical_memory()
    return min((limit for limit in limits if not physical or limit < physical), default=None)


def _give_back_large_buffers() -> None:
    """glibc learns from large buffers that are freed to keep such memory, which fragments; MLX's on a CPU are
    of that kind. Fixed thresholds stop it (mallopt(3), M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _upwards(root: Path, folder: Path) -> list[Path]:
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _phys_footprint() -> int:
    """Source: Apple, libproc.h, `proc_pid_rusage`, and sys/resource.h, `rusage_info_v0`: 16 bytes of uuid and
    numbers of 64 bits, of which the eighth is `ri_phys_footprint`."""
    info = (ctypes.c_uint64 * 64)()
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(info))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else int(info[2 + 7])
