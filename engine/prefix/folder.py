"""What files there are below the prefix cache's folder; those that are not its own are left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.prefix.chain import DIGEST_BYTES
from chairlift.engine.prefix.files import SUFFIX, TEMPORARY

STALE_SECONDS = 3600.0
"""After which a file that was never finished is nobody's any more."""


@dataclass(frozen=True, slots=True)
class PageFile:
    path: Path
    digest: bytes
    size: int
    used: float
    """Seconds of the time of day."""


def pages_of(folder: Path) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """The pages of a model, by the names of their files; others are left alone."""
    for part in _entries(folder):
        if len(part.name) != 2 or not part.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(part.path)):
            name, dot, suffix = entry.name.partition(".")
            if dot + suffix != SUFFIX or len(name) != 2 * DIGEST_BYTES or name[:2] != part.name:
                continue
            with suppress(ValueError):
                yield bytes.fromhex(name), entry


def all_files(root: Path) -> Iterator[PageFile]:
    """The pages of all models."""
    for model in _entries(root):
        if model.is_dir(follow_symlinks=False):
            for digest, entry in pages_of(Path(model.path)):
                with suppress(OSError):
                    told = entry.stat(follow_symlinks=False)
                    yield PageFile(Path(entry.path), digest, told.st_size, told.st_mtime)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def unlink(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def unlink_unfinished(root: Path, now: float) -> None:
    """Delete what those have left who were killed while they wrote."""
    for path in root.glob(f"*/*/.*{TEMPORARY}"):
        with suppress(OSError):
            if now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
