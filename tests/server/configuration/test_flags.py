"""Flags are made from the fields, and count before everything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chairlift.server.cli.app import run
from chairlift.server.configuration.about import Group
from chairlift.server.configuration.fields import Configuration, about, flag_of
from tests.server.configuration.table import PAGE, written

Captured = pytest.CaptureFixture[str]


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.server.configuration.table` makes it so."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page


def test_help_lists_every_flag_in_its_group(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    titles = re.findall(r"╭─ (.+?) ─", shown)
    assert titles == ["Options", "Configuration", *(group for group in Group if group in titles)]
    for name in Configuration.model_fields:
        told = about(name)
        assert told.group in titles and told.help.endswith(".")
        assert (re.search(rf"{flag_of(name)}\s", shown) is not None) == told.flag


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prefix-cache-ram", "much"],
            "Invalid value for --prefix-cache-ram: 'much' is no size such as 8GB",
        ),
        (["--config", "/nowhere.toml"], "--config"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_flag_that_cannot_be_is_2_and_one_line(
    arguments: list[str], message: str, capsys: Captured
) -> None:
    assert run(["config", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_a_file_or_variable_that_cannot_be_is_2_and_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lift.toml"
    path.write_text("ports = 1")
    assert run(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"chairlift: {path}, line 1: there is no setting 'ports'; is port meant?\n"
    )
    monkeypatch.setenv("CHAIRLIFT_PORT", "http")
    assert run(["serve", "--config", "/dev/null"]) == 2
    assert capsys.readouterr().err.startswith("chairlift: Invalid value for CHAIRLIFT_PORT: ")


def test_a_flag_can_be_taken_back(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("CHAIRLIFT_ACCESS_LOG", "1")
    assert run(["config", "--config", "/dev/null", "--no-access-log"]) == 0
    assert "access_log = false  # --access-log" in capsys.readouterr().out
