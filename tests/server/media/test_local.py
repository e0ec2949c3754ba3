"""Images from a folder of the operator's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chairlift.server.media.errors import MediaError
from chairlift.server.media.local import read_local


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files inside and outside, and links between them."""
    inside, outside = tmp_path / "open", tmp_path / "open-not"
    for place in (inside / "a b", outside):
        place.mkdir(parents=True)
    (inside / "cat.png").write_bytes(b"cat")
    (inside / "a b" / "ü.png").write_bytes(b"umlaut")
    (outside / "secret.png").write_bytes(b"secret")
    (inside / "to-cat.png").symlink_to(inside / "cat.png")
    (inside / "to-secret.png").symlink_to(outside / "secret.png")
    (inside / "to-outside").symlink_to(outside)
    (inside / "to-nothing.png").symlink_to(inside / "nothing.png")
    (inside / "circle.png").symlink_to(inside / "circle.png")
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize(
    ("url", "content"),
    [
        ("cat.png", b"cat"),
        ("./a b/../cat.png", b"cat"),
        ("a b/ü.png", b"umlaut"),
        ("{folder}/cat.png", b"cat"),
        ("file://{folder}/cat.png", b"cat"),
        ("FILE://localhost{folder}/a%20b/%C3%BC.png", b"umlaut"),
        ("to-cat.png", b"cat"),
        ("a b/../../open/cat.png", b"cat"),
    ],
)
def test_files_below(folder: Path, url: str, content: bytes) -> None:
    assert read_local(url.format(folder=folder), folder, 100) == content


@pytest.mark.parametrize(
    "url",
    [
        "nothing.png",
        "../open-not/secret.png",
        "{folder}/../open-not/secret.png",
        "{folder}-not/secret.png",
        "file://{folder}/%2e%2e/open-not/secret.png",
        "file://{folder}/..%2Fopen-not%2Fsecret.png",
        "file://elsewhere{folder}/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "to-secret.png",
        "to-outside/secret.png",
        "to-nothing.png",
        "circle.png",
        "pipe.png",
        "a b",
        ".",
        "",
        "cat.png\0",
        "file://{folder}/cat%00.png",
        "file://{folder}/%ff.png",
        "x" * 5000,
    ],
)
def test_nothing_else(folder: Path, url: str) -> None:
    with pytest.raises(MediaError) as caught:
        read_local(url.format(folder=folder), folder, 100)
    assert caught.value.message == "is no file below the folder that images may come from"


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert read_local("cat.png", link, 100) == b"cat"
    assert read_local(f"file://{link}/cat.png", link, 100) == b"cat"


def test_a_link_put_there_after_the_path_was_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the judgement and the opening the file gives way to a link out of the folder."""
    judge = Path.is_relative_to

    def swap(path: Path, other: Path) -> bool:
        (folder / "cat.png").unlink(missing_ok=True)
        (folder / "cat.png").symlink_to(folder.parent / "open-not" / "secret.png")
        return judge(path, other)

    monkeypatch.setattr(Path, "is_relative_to", swap)
    with pytest.raises(MediaError):
        read_local("cat.png", folder, 100)


def test_larger_than_allowed(folder: Path) -> None:
    assert read_local("cat.png", folder, 3) == b"cat"
    with pytest.raises(MediaError) as caught:
        read_local("cat.png", folder, 2)
    assert caught.value.message == "is larger than 2 bytes"
