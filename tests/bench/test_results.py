"""RESULTS.md: sections that are replaced as wholes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.bench.scripts import script

results = script("results")


def test_a_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    results.write_section(path, "one", "first")
    results.write_section(path, "two", "second")
    path.write_text(path.read_text() + "\nby hand\n")
    results.write_section(path, "one", "\nfirst again\n\n")
    assert path.read_text() == (
        results.HEADER.rstrip()
        + "\n\n<!-- one:begin -->\nfirst again\n<!-- one:end -->"
        + "\n\n<!-- two:begin -->\nsecond\n<!-- two:end -->\n\nby hand\n"
    )


def test_markdown_table() -> None:
    assert results.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_a_dry_run_prints_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    results.writing_arguments(parser)
    path = tmp_path / "RESULTS.md"
    results.publish(parser.parse_args(["--results", str(path), "--dry-run"]), "one", "first")
    assert capsys.readouterr().out == "first\n" and not path.exists()
    results.publish(parser.parse_args(["--results", str(path)]), "one", "first")
    assert "<!-- one:begin -->\nfirst\n" in path.read_text()
