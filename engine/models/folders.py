"""Where models that Chairlift made are kept, and how a folder comes to be whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_path

from chairlift.engine.errors import ModelUnavailable

CACHE_VARIABLE = "CHAIRLIFT_CACHE"
"""Environment variable that moves the cache folder."""


def cache_folder() -> Path:
    """The user's cache folder for Chairlift; it need not exist yet."""
    moved = os.environ.get(CACHE_VARIABLE)
    return Path(moved).expanduser().absolute() if moved else user_cache_path("chairlift", appauthor=False)


def bytes_below(folder: Path) -> int:
    """Of all files in a folder and its folders; what vanishes meanwhile, or cannot be looked at, is 0."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def unwritable(folder: Path) -> str | None:
    """Why nothing can be made in a folder, which need not exist; None: it can. Tried, and nothing is left
    behind: rights do not tell of file systems that take no files."""
    base = existing(folder)
    if not base.is_dir():
        return f"{base} is no folder"
    try:
        with tempfile.TemporaryFile(dir=base) if base == folder else tempfile.TemporaryDirectory(dir=base):
            return None
    except OSError as error:
        return error.strerror or str(error)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def build_folder(folder: Path, fill: Callable[[Path], None]) -> Path:
    """`folder`, made by `fill` unless it is already there.

    `fill` writes into a temporary folder beside it, which is synced and renamed at the end: a process that
    is killed leaves no half-made `folder`. Processes that want the same folder wait for each other (a
    kernel lock, gone with its holder), and what a killed one left behind is cleared by the next.

    Raises:
        ModelUnavailable: the place cannot be written or is full.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            if not folder.is_dir():
                _build(folder, fill)
    except OSError as error:
        raise ModelUnavailable(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder


def _build(folder: Path, fill: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.partial-"
    for left_over in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock that goes with `path` (a hidden file beside it), waiting for other processes."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Have the kernel put a file's content, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
