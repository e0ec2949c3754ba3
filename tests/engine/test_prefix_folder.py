"""What those leave who are killed while they write goes; nothing else does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from chairlift.engine.prefix import folder as folder_module
from chairlift.engine.prefix.files import write_page
from chairlift.engine.prefix.folder import STALE_SECONDS, unlink_unfinished
from tests.engine.pages_on_disk import chain_of, content, pages_of

NAME = "ab" + "0" * 30
NOW = 10**9


def unfinished(folder: Path, name: str, *, age: float = STALE_SECONDS + 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("")
    os.utime(path, (NOW - age, NOW - age))
    return path


def test_only_old_files_of_pages_that_were_never_finished_go(tmp_path: Path) -> None:
    model = tmp_path / "model"
    gone = unfinished(model / "ab", f".{NAME}-77-01234567.tmp")
    elsewhere = unfinished(tmp_path.parent / "elsewhere" / "ab", f".{NAME}-77-01234567.tmp")
    (tmp_path / "link").symlink_to(elsewhere.parent.parent)
    kept = [
        elsewhere,
        unfinished(model / "ab", f".{NAME}-78-01234567.tmp", age=STALE_SECONDS - 1),
        unfinished(model / "ab", ".settings.tmp"),
        unfinished(model / "ab", f"{NAME}.safetensors"),
        unfinished(model / "cd", f".{NAME}-77-01234567.tmp"),
        unfinished(tmp_path / "a program" / "of another", f".{NAME}-77-01234567.tmp"),
    ]
    unlink_unfinished(tmp_path, NOW)
    assert not gone.exists() and all(path.exists() for path in kept)


def test_another_may_empty_the_folder_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("ab", "ac"):
        unfinished(tmp_path / "model" / part, f".{part}{'0' * 30}-77-01234567.tmp")
    scandir = os.scandir

    def emptied(path: object) -> object:
        if Path(str(path)).name in ("ab", "ac"):
            shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(folder_module.os, "scandir", emptied)
    unlink_unfinished(tmp_path, NOW)
    assert not (tmp_path / "model").exists()


def test_what_a_writer_leaves_is_known_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **more: object) -> None:
        raise OSError("killed")

    (page,) = pages_of(chain_of(1, 2, 3, 4))
    path = tmp_path / "model" / page.digest.hex()[:2] / f"{page.digest.hex()}.safetensors"
    path.parent.mkdir(parents=True)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", fails)
        killed.setattr(Path, "unlink", fails)
        with pytest.raises(OSError):
            write_page(path, page, content(page))
    (left,) = path.parent.iterdir()
    unlink_unfinished(tmp_path, left.stat().st_mtime + STALE_SECONDS + 1)
    assert not left.exists()
