"""What files there are below the prefix cache's folder; those that are not its own are left alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chairlift.engine.prefix.chain import DIGEST_BYTES
from chairlift.engine.prefix.files import SUFFIX, TEMPORARY

UNFINISHED = re.compile(rf"\.[0-9a-f]{{{2 * DIGEST_BYTES}}}-\d+-[0-9a-f]{{8}}{re.escape(TEMPORARY)}")
"""Names under which `chairlift.engine.prefix.files.write_page` writes."""
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
    for part, entry in _files(folder):
        name, dot, suffix = entry.name.partition(".")
        if dot + suffix != SUFFIX or len(name) != 2 * DIGEST_BYTES or name[:2] != part:
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


def _files(model: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """What lies in a model's folders, and the name of the folder: the first byte of the digests there."""
    for part in _entries(model):
        if len(part.name) == 2 and part.is_dir(follow_symlinks=False):
            for entry in _entries(Path(part.path)):
                yield part.name, entry


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
    for model in _entries(root):
        if model.is_dir(follow_symlinks=False):
            for part, entry in _files(Path(model.path)):
                if UNFINISHED.fullmatch(entry.name) and entry.name[1:3] == part:
                    with suppress(OSError):
                        if now - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                            os.unlink(entry.path)
