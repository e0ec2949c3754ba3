"""Runs that fail are counted, and given up."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from chairlift.server.service.record import (
    Ended,
    Record,
    RecordFile,
    Run,
    begin,
    end,
    listening,
    ready,
    settled,
)


def failed(record: Record, code: int = 1, reason: str = "No.") -> Record:
    return end(begin(record, 7, 100.0), code, reason, 101.0)


def test_a_good_life() -> None:
    record = ready(listening(begin(Record(), 7, 100.0), "http://x"), ("a", "b"), 130.0)
    assert record.run == Run(7, 100.0, "http://x", ("a", "b"), 130.0)
    stopped = end(settled(record), 0, "", 500.0)
    assert stopped.run is not None and stopped.run.ended == Ended(500.0, 0, "")
    again = begin(stopped, 8, 600.0)
    assert (again.failures, again.gave_up, again.run) == (0, None, Run(8, 600.0))
    assert again.previous == stopped.run


def test_five_failed_starts_in_a_row_are_enough() -> None:
    record = Record()
    for count in range(1, 5):
        record = failed(record)
        assert (record.failures, record.gave_up) == (count, None)
    record = failed(record, reason="The port is taken.")
    assert record.gave_up == "5 starts in a row failed, the last with: The port is taken"


def test_killed_starts_count_when_the_next_finds_them() -> None:
    record = begin(Record(), 1, 100.0)
    for pid in range(2, 6):
        record = begin(record, pid, 100.0 + pid)
        assert record.failures == pid - 1 and record.gave_up is None
    assert record.previous is not None and record.previous.ended == Ended(105.0, None, "")
    given_up = begin(record, 6, 110.0)
    assert given_up.gave_up == "5 starts in a row failed, the last with: killed"
    assert given_up.run is not None and given_up.run.pid == 5  # it does not run


def test_a_start_after_giving_up_is_somebodys_and_counts_from_zero() -> None:
    record = Record()
    for _ in range(5):
        record = failed(record)
    again = begin(record, 9, 200.0)
    assert (again.failures, again.gave_up) == (0, None)
    assert again.run == Run(9, 200.0)
    assert failed(record).failures == 1


def test_who_was_ready_for_a_while_did_not_fail_to_start() -> None:
    record = failed(failed(failed(Record())))
    record = settled(ready(begin(record, 7, 100.0), ("a",), 110.0))
    assert record.failures == 0
    crashed = end(record, 70, "wedged", 9000.0)
    assert (crashed.failures, crashed.gave_up) == (0, None)
    killed = begin(record, 8, 9000.0)
    assert killed.failures == 0


def test_ready_for_a_moment_is_a_failed_start() -> None:
    assert end(ready(begin(Record(), 7, 100.0), ("a",), 110.0), 1, "", 111.0).failures == 1


def test_a_stop_that_was_asked_for_clears_the_count() -> None:
    assert failed(failed(Record()), code=0).failures == 0


def test_flags_that_mean_nothing_are_not_tried_again() -> None:
    record = failed(Record(), code=2, reason="No such option: --prot")
    assert record.gave_up == "1 start failed, the last with: No such option: --prot"


def test_the_file_comes_back(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "made" / "chairlift.json")
    assert file.read() == Record()
    record = begin(failed(ready(begin(Record(), 7, 1.5), ("a", "ü"), 2.5)), 8, 3.5)
    file.write(record)
    assert file.read() == record
    assert [path.name for path in file.path.parent.iterdir()] == ["chairlift.json"]
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"failures": "many"}', b"\xff"])
def test_a_file_that_says_nothing_is_an_empty_record(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert RecordFile(path).read() == Record()
    assert "cannot be read" in caplog.text


def test_a_place_that_cannot_be_written_keeps_nobody_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        RecordFile(tmp_path / "file" / "record").write(Record())
    assert "cannot be written" in caplog.text

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    file = RecordFile(tmp_path / "record")
    file.write(Record(failures=1))
    monkeypatch.setattr(os, "fsync", full)
    file.write(Record(failures=2))
    assert file.read() == Record(failures=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "record"]
