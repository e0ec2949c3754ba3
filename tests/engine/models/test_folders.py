"""A folder is whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.folders import build_folder, cache_folder, unwritable


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "there"))
    assert cache_folder() == tmp_path / "there"
    monkeypatch.delenv("CHAIRLIFT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().is_relative_to(tmp_path)


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("1")

    target = tmp_path / "deep" / "model"
    assert build_folder(target, fill) == build_folder(target, fill) == target
    assert len(calls) == 1 and calls[0] != target and not calls[0].exists()
    assert [path.name for path in target.iterdir()] == ["a"]


def test_where_something_can_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert unwritable(tmp_path) is None and unwritable(tmp_path / "new" / "er") is None
    assert unwritable(file / "x") == f"{file} is no folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that takes no files is needed")
def test_where_nothing_can_be_made_whatever_its_rights_say() -> None:
    assert unwritable(Path("/proc")) and unwritable(Path("/proc/new/er"))


def test_what_raises_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise ModelUnavailable("no")

    with pytest.raises(ModelUnavailable, match="^no$"):
        build_folder(tmp_path / "model", fill)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelUnavailable, match="model cannot be written: No space left on device"):
        build_folder(tmp_path / "model", fill)


KILLED = """
import sys
from pathlib import Path
from chairlift.engine.models.folders import build_folder

def fill(folder):
    (folder / "half").write_text("1")
    print("half", flush=True)
    sys.stdin.read()

build_folder(Path(sys.argv[1]), fill)
"""


def test_a_killed_process_leaves_no_folder_and_no_lock(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not target.exists()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    build_folder(target, lambda folder: (folder / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_two_at_once_build_one(tmp_path: Path) -> None:
    """The second waits for the first, which waits until the second has begun."""
    target = tmp_path / "model"
    begun = threading.Event()
    built: list[str] = []

    def first(folder: Path) -> None:
        other.start()
        assert begun.wait(20)
        built.append("first")

    def second() -> None:
        begun.set()
        build_folder(target, lambda folder: built.append("second"))

    other = threading.Thread(target=second)
    build_folder(target, first)
    other.join(20)
    assert not other.is_alive()
    assert built == ["first"]
