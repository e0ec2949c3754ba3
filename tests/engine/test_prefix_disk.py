"""The tier on the disk: what is kept, what goes, and whom it bothers."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from chairlift.engine.prefix import disk as disk_module
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.fetch import Fetch
from chairlift.engine.prefix.folder import all_files
from chairlift.engine.prefix.vocabulary import Page, PageData
from tests.engine.pages_on_disk import (
    MODEL,
    chain_of,
    checkpoint_of,
    content,
    offer,
    opened,
    pages_of,
    read,
    same,
    write,
)


@pytest.fixture
def disks() -> Iterator[list[PrefixDisk]]:
    """Closed at the end."""
    made: list[PrefixDisk] = []
    yield made
    closed = [disk.close(5) for disk in made]
    assert all(closed)


def total(folder: Path) -> int:
    return sum(file.size for file in all_files(folder))


def test_what_is_offered_is_found_by_the_next_process(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(40)))
    pages.append(checkpoint_of(pages[-1]))
    first = opened(tmp_path)
    write(first, pages)
    assert sorted(first.returned()) == sorted(page.id for page in pages)
    assert first.stats.writes == 11 and first.stats.bytes == total(tmp_path)
    assert first.close(5)
    second = opened(tmp_path)
    disks.append(second)
    assert all(page.digest in second for page in pages) and second.stats.entries == 11
    found = read(second, pages)
    assert len(found) == 11 and all(same(page, found[page.digest]) for page in pages)
    assert second.stats.reads == 11


def test_models_do_not_see_each_other_and_share_the_bound(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(400)))
    one = opened(tmp_path, 50_000, clock=lambda: 1000.0)
    two = opened(tmp_path, 50_000, "1" * 32, clock=lambda: 2000.0)
    disks += [one, two]
    write(one, pages[:30])
    assert pages[0].digest in one and pages[0].digest not in two and read(two, pages[:3]) == {}
    write(two, pages[:30])
    assert total(tmp_path) <= 50_000
    kept = [sum(page.digest in disk for page in pages) for disk in (one, two)]
    assert kept[1] == 30, "what is younger stays"
    found = read(one, pages[:30])
    assert 0 < len(list((tmp_path / MODEL).rglob("*.safetensors"))) < 30 and len(found) < 30


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    now = [1000.0]
    disk = opened(tmp_path, 25_000, clock=lambda: now[0])
    disks.append(disk)
    old, used, young = (pages_of(chain_of(*range(start, start + 20))) for start in (0, 100, 200))
    for pages in (old, used):
        write(disk, pages)
        now[0] += 100
    disk.used(used)
    assert disk.settle(5)
    now[0] += 100
    write(disk, young)
    now[0] += 100
    write(disk, pages_of(chain_of(*range(300, 316))))
    left = [[page.digest in disk for page in pages] for pages in (old, used, young)]
    assert not all(left[0]) and all(left[1]) and all(left[2])
    assert left[0] == sorted(left[0], reverse=True), "of a sequence, its end goes first"


@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "other", "folder"])
def test_a_file_that_is_not_right_is_a_miss_and_goes(
    how: str, tmp_path: Path, disks: list[PrefixDisk]
) -> None:
    pages = pages_of(chain_of(*range(20)))
    disk = opened(tmp_path)
    disks.append(disk)
    write(disk, pages)
    path = disk._path(pages[2].digest)
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "other":
        path.write_bytes(disk._path(pages[1].digest).read_bytes())
    else:
        flipped = bytes([*data[:-3], data[-3] ^ 1, *data[-2:]])
        path.write_bytes({"torn": data[:-7], "flipped": flipped, "empty": b""}[how])
    found = read(disk, pages)
    assert found.keys() >= {page.digest for page in pages[:2]} and pages[2].digest not in found
    assert all(same(page, found[page.digest]) for page in pages if page.digest in found)
    assert pages[2].digest not in disk and disk.stats.failures == 1
    assert how == "folder" or not path.exists()
    if how != "folder":
        write(disk, pages[2:3])
        assert same(pages[2], read(disk, pages[2:3])[pages[2].digest])


def test_what_others_have_deleted_is_a_miss(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(20)))
    one, two = opened(tmp_path), opened(tmp_path)
    disks += [one, two]
    write(one, pages)
    assert not any(page.digest in two for page in pages), "not before it looks again"
    two._enqueue(two._rescan)
    assert two.settle(5) and all(page.digest in two for page in pages)
    one.clear()
    assert one.settle(5) and one.stats.entries == one.stats.bytes == 0
    assert read(two, pages) == {} and pages[0].digest not in two
    assert two.settle(5) and pages[4].digest not in two, "one that is gone has it look for others"
    write(two, pages)
    assert len(read(two, pages)) == 5 and two.stats.failures == 0


def test_foreign_files_are_left_alone(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    folder = tmp_path / MODEL / "ab"
    folder.mkdir(parents=True)
    names = ["notes.txt", f"ab{'0' * 30}.txt", f"{'zz' * 16}.safetensors", f"cd{'0' * 30}.safetensors"]
    for name in names:
        (folder / name).write_text("mine")
    (tmp_path / "readme").write_text("mine")
    disk = opened(tmp_path, 5000)
    disks.append(disk)
    write(disk, pages_of(chain_of(*range(400))))
    assert disk.stats.entries and all((folder / name).read_text() == "mine" for name in names)


def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, disks: list[PrefixDisk], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = pages_of(chain_of(*range(80)))
    disk = opened(tmp_path)
    disks.append(disk)
    wanted = write(disk, pages[:2])
    full = [True]
    write_page = disk_module.write_page

    def refuse(path: Path, page: Page, data: PageData) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_page(path, page, data)

    monkeypatch.setattr(disk_module, "write_page", refuse)
    with caplog.at_level(logging.WARNING):
        wanted += write(disk, pages[2:6])
        assert disk.stats.failures == 1 and disk.stats.skipped == 4 and len(caplog.records) == 1
        assert "No space left" in caplog.text
        full[0] = False
        wanted += write(disk, pages[6:8])
        assert disk.stats.writes == 2, "not yet"
        monkeypatch.setattr(disk_module, "RETRY_SECONDS", 0.0)
        others = pages_of(chain_of(*range(9, 30)))
        wanted += write(disk, others)
        assert disk.stats.writes == 2 + len(others) and len(caplog.records) == 2
    wanted += write(disk, pages[6:8])
    assert pages[6].digest not in disk, "what is before it is not there"
    wanted += write(disk, pages[2:8])
    assert all(page.digest in disk for page in pages[:8])
    assert disk.returned() == wanted, "what was written and what was not"


def test_what_the_disk_cannot_keep_up_with_is_left_out(
    tmp_path: Path, disks: list[PrefixDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, standing = threading.Event(), threading.Event()
    write_page = disk_module.write_page

    def slow(path: Path, page: Page, data: PageData) -> int:
        standing.set()
        assert gate.wait(10)
        return write_page(path, page, data)

    monkeypatch.setattr(disk_module, "write_page", slow)
    pages, others = pages_of(chain_of(*range(40))), pages_of(chain_of(*range(50, 54)))
    disk = opened(tmp_path, queue=2500)
    disks.append(disk)
    assert offer(disk, pages[:1]) == [1]
    assert standing.wait(10)
    assert not disk.wants(others[0], 1501), "with those that are to come"
    assert offer(disk, pages[1:]) == [2]
    gate.set()
    assert disk.settle(10)
    assert [page.digest in disk for page in pages] == [True, True] + [False] * 8
    assert disk.stats.skipped == 9 and sorted(disk.returned()) == [1, 2]


def test_what_is_there_is_not_wanted_again(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(20)))
    disk = opened(tmp_path)
    disks.append(disk)
    write(disk, pages)
    assert not any(disk.wants(page, 1000) for page in pages) and disk.stats.skipped == 0


def test_what_the_runner_cannot_give_is_left_out(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(20)))
    disk = opened(tmp_path)
    disks.append(disk)
    assert disk.wants(pages[0], 1000)
    disk.offer(pages[0], 1000, lambda: None)
    assert disk.settle(5) and disk.returned() == [1]
    assert pages[0].digest not in disk and (disk.stats.failures, disk.stats.skipped) == (1, 1)
    assert write(disk, pages[1:]) == [], "what is before it is not there"
    assert len(write(disk, pages)) == 5 and len(read(disk, pages)) == 5


def test_a_page_larger_than_the_limit_is_not_written(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    disk = opened(tmp_path, 500)
    disks.append(disk)
    write(disk, pages_of(chain_of(1, 2, 3, 4)))
    assert total(tmp_path) == 0 and disk.stats.skipped == 1


def test_discarded_pages_go_even_when_they_are_only_queued(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(20)))
    disk = opened(tmp_path)
    disks.append(disk)
    offer(disk, pages)
    disk.discard(page.digest for page in pages[3:])
    assert disk.settle(5) and len(read(disk, pages)) == 3


def test_nobody_reads_on_for_those_who_have_left(tmp_path: Path, disks: list[PrefixDisk]) -> None:
    pages = pages_of(chain_of(*range(80)))
    disk = opened(tmp_path)
    disks.append(disk)
    write(disk, pages)
    done = threading.Event()
    disk.fetch(Fetch(1, tuple(pages), 0), lambda: False, lambda data: done.set())
    assert done.wait(10) and disk.stats.reads == 0


def test_closing_writes_what_is_queued_and_then_takes_nothing(tmp_path: Path) -> None:
    pages = pages_of(chain_of(*range(40)))
    disk = opened(tmp_path)
    assert len(offer(disk, pages[:8])) == 8 and disk.wants(pages[8], 1000)
    assert disk.close(10)
    assert offer(disk, pages[8:]) == []
    disk.offer(pages[8], 1000, partial(content, pages[8]))
    assert len(list(all_files(tmp_path))) == 8
    assert sorted(disk.returned()) == [page.id for page in pages[:9]], "what was wanted comes back"
    assert not disk.settle(0)


def test_nothing_of_the_runner_is_read_by_a_writer_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder hangs, the engine ends, its memory is somebody else's: then the folder answers."""
    standing, gate, asked = threading.Event(), threading.Event(), list[int]()
    (page,) = pages_of(chain_of(*range(4)))
    disk = opened(tmp_path)

    def hangs(need: int) -> None:
        standing.set()
        assert gate.wait(10)

    def gives() -> PageData:
        asked.append(page.id)
        return content(page)

    monkeypatch.setattr(disk, "_make_room", hangs)
    disk.offer(page, 1000, gives)
    assert standing.wait(10) and not disk.close(0)
    gate.set()
    disk._writer.join(10)
    assert asked == [] and list(all_files(tmp_path)) == [] and disk.returned() == [page.id]


def test_closing_waits_for_what_is_read_of_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    (page,) = pages_of(chain_of(*range(4)))
    disk = opened(tmp_path)

    def gives() -> PageData | None:
        closing.start()
        assert disk._given_up.wait(10)
        events.append("read")
        return None

    def close() -> None:
        disk.close(0)
        events.append("closed")

    monkeypatch.setattr(disk._writer, "join", lambda timeout: None)
    closing = threading.Thread(target=close)
    disk.offer(page, 1000, gives)
    threading.Thread.join(disk._writer, 10)
    closing.join(10)
    assert events == ["read", "closed"]


def test_a_folder_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        opened(tmp_path / "file")


KILLED = """
import os, random, signal, sys
from pathlib import Path
from tests.engine.pages_on_disk import chain_of, offer, opened, pages_of

def writer(number, told):
    disk = opened(Path(sys.argv[1]), 400_000)
    start = 1000 * number + random.randrange(200)
    while True:
        for page in pages_of(chain_of(*range(start, start + 200))):
            offer(disk, [page], 3000)
            if page.start % 20 == 0:
                disk.settle()
                os.write(told, b".")
        start += 1

for _ in range(25):
    children = []
    for number in range(2):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            writer(number, tell)
        os.close(tell)
        children.append((child, told))
    for child, told in children:
        for _ in range(random.randint(1, 4)):
            os.read(told, 1)
    for child, told in children:
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(told)
"""
"""Two processes at a time on one folder, evicting as they write."""


def test_processes_killed_while_they_write_leave_nothing_wrong(
    tmp_path: Path, disks: list[PrefixDisk]
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    disk = opened(tmp_path, 400_000)
    disks.append(disk)
    assert 0 < disk.stats.bytes <= 400_000
    found = 0
    for start in (*range(201), *range(1000, 1201)):
        pages = [page for page in pages_of(chain_of(*range(start, start + 200))) if page.digest in disk]
        assert all((data := disk.read(page)) is not None and same(page, data, 3000) for page in pages)
        found += len(pages)
    assert found == disk.stats.entries and disk.stats.failures == 0
