"""Logs in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.server.cli.app import run
from chairlift.server.complaint import complain
from chairlift.server.log_file import OLD_FILES, LogFile, newest_lines
from chairlift.server.served import ServeOptions


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, __file__, 1, message, None, None)


def test_its_size_is_bounded_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "log"
    handler = LogFile(path, 1000)
    for number in range(1000):
        handler.emit(record(f"line {number:04} of the log"))
    handler.close()
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["log", *(f"log.{number}" for number in range(1, OLD_FILES + 1))]
    assert all(0 < file.stat().st_size <= 1000 for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert newest_lines(path, 60) == [f"line {number:04} of the log" for number in range(940, 1000)]


def test_where_no_file_can_be_put_beside_it_the_newest_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (tmp_path / f"log.{OLD_FILES}").mkdir()  # nothing can take its place; root may write to any folder
    for number in range(1, OLD_FILES):
        (tmp_path / f"log.{number}").touch()
    handler = LogFile(path, 1000)
    for number in range(1000):
        handler.emit(record(f"line {number:04} of the log"))
    handler.close()
    lines = path.read_text().splitlines()
    assert 0 < path.stat().st_size <= 1000 and lines[-1] == "line 0999 of the log"


def test_the_newest_lines_of_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert newest_lines(path, 5) == []
    path.write_text("a\nb\n")
    assert newest_lines(path, 5) == ["a", "b"]
    assert newest_lines(path, 1) == ["b"]
    assert newest_lines(path, 0) == []
    path.with_name("log.1").write_bytes(b"older\n\xff\n")
    assert newest_lines(path, 3) == ["\ufffd", "a", "b"]


def test_a_full_disk_loses_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LogFile(tmp_path / "log", 1000)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler, "shouldRollover", full)
    handler.emit(record("lost"))
    monkeypatch.undo()
    handler.emit(record("kept"))
    handler.close()
    assert newest_lines(tmp_path / "log", 9) == ["kept"]
    assert capsys.readouterr() == ("", "")


def test_serve_logs_there_and_complains_in_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_server(options: ServeOptions, announce: object, complaint: object) -> int:
        logging.getLogger("chairlift").warning("while it runs")
        complain("Nothing\nworks.")
        return 7

    monkeypatch.setattr("chairlift.server.serve.run_server", run_server)
    path = tmp_path / "log"
    assert run(["serve", "--config", "/dev/null", "--log-file", str(path)]) == 7
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("WARNING", "chairlift", "while it runs"),
        ("ERROR", "chairlift.server", "Nothing works."),
    ]
    assert capsys.readouterr() == ("", "chairlift: Nothing works.\n")


def test_a_log_that_cannot_be_written_is_one_line_and_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(["serve", "--config", "/dev/null", "--log-file", str(tmp_path / "file" / "log")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("size", ["off", "auto", "0"])
def test_a_log_has_a_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--config", "/dev/null", "--log-file-size", size]) == 2
    assert "--log-file-size" in capsys.readouterr().err
