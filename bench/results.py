"""Sections of RESULTS.md: each stands between its own two markers, and is replaced as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")

HEADER = """# Measurements

Written by `make bench` and the scripts beside this file; each section says how to run it again. Seconds
unless another unit is named.
"""


def write_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of section `name`; a section that is not there yet goes to the end."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    old = path.read_text() if path.exists() else HEADER
    if begin in old and end in old:
        before, rest = old.split(begin, 1)
        after = rest.split(end, 1)[1]
        path.write_text(before + section + after)
    else:
        path.write_text(f"{old.rstrip()}\n\n{section}\n")


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def writing_arguments(parser: argparse.ArgumentParser) -> None:
    """Of every script that writes a section when it has measured."""
    parser.add_argument("--revision", help="the commit measured, where git does not know it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print the section and leave RESULTS.md alone")


def publish(arguments: argparse.Namespace, name: str, text: str) -> None:
    print(text)
    if not arguments.dry_run:
        write_section(arguments.results, name, text)
