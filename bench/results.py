"""Sections of RESULTS.md: each stands between its own two markers, and is replaced as a whole.

`python bench/results.py device.json` writes the section of a run of bench/device.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")

HEADER = """# Measurements

Written by `make bench` and the scripts beside this file; each section says how to run it again. Seconds
unless another unit is named.
"""

DECODE_NOTE = """The bare step is the model's forward on a pre-filled batch cache of equal lengths, argmax,
one step of look-ahead; unmasked: the same on a cache that needs no mask. Steady: all rows decode. Joins: the
whole run from the first prompt to the last token, new rows taking the places of finished ones."""


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


def device_section(run: dict[str, Any]) -> str:
    """The Markdown of bench/device.py's JSON."""
    machine = run["machine"]
    parts = [
        "## One GPU, random weights",
        f"{machine['device']}, {machine['versions']}; chairlift {machine['revision'] or 'revision unknown'}. "
        f"`python bench/device.py {run['arguments']}`".rstrip("` ")
        + "`",
    ]
    throughput = run.get("throughput", [])
    if throughput:
        parts += [
            "### Decode, tok/s",
            DECODE_NOTE,
            table(
                ["model", "batch", "path", "steady", "of bare", "joins", "of bare", "step ms p50"],
                [_throughput_row(throughput, entry) for entry in throughput],
            ),
        ]
    lengths = run.get("lengths", [])
    if lengths:
        parts += [
            "### Rows of unequal lengths",
            "KV bytes against what the rows' tokens need (sum of lengths × bytes a token).",
            table(
                ["model", "rows", "path", "step ms p50", "KV GB", "of the sum", "peak GB"],
                [_lengths_row(entry) for entry in lengths],
            ),
        ]
    failed = [entry for entry in [*throughput, *lengths] if entry.get("error")]
    if failed:
        parts.append("Failed parts:\n" + "\n".join(f"- {_name(e)}: {e['error']}" for e in failed))
    return "\n\n".join(parts)


def _name(entry: dict[str, Any]) -> str:
    return " ".join(str(entry[key]) for key in ("model", "batch", "rows", "path") if key in entry)


def _path(entry: dict[str, Any]) -> str:
    """The path, with how our runner batched the family, and a mark where a deadline cut the run short."""
    batching = f" ({entry['batching']})" if entry.get("batching") else ""
    return f"{entry['path']}{batching}{' (cut)' if entry.get('cut') else ''}"


def _number(value: float | None, digits: str = ",.0f") -> str:
    return "–" if value is None else format(value, digits)


def _throughput_row(entries: list[dict[str, Any]], entry: dict[str, Any]) -> list[str]:
    bare = next(
        (
            other.get("steady_tok_s")
            for other in entries
            if other["path"] == "bare"
            and (other["model"], other["batch"]) == (entry["model"], entry["batch"])
        ),
        None,
    )
    steady, joins = entry.get("steady_tok_s"), entry.get("joins_tok_s")
    return [
        entry["model"],
        str(entry["batch"]),
        _path(entry),
        _number(steady),
        _number(steady / bare if steady and bare else None, ".2f"),
        _number(joins),
        _number(joins / bare if joins and bare else None, ".2f"),
        _number(entry.get("step_ms_p50"), ".2f"),
    ]


def _lengths_row(entry: dict[str, Any]) -> list[str]:
    kv, need = entry.get("kv_bytes"), entry.get("need_bytes")
    return [
        entry["model"],
        entry["rows"],
        _path(entry),
        _number(entry.get("step_ms_p50"), ".2f"),
        _number(kv / 1e9 if kv else None, ".2f"),
        _number(kv / need if kv and need else None, ".2f"),
        _number(entry["peak_bytes"] / 1e9 if entry.get("peak_bytes") else None, ".1f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the device section of RESULTS.md.")
    parser.add_argument("json", type=Path, help="what bench/device.py wrote")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    write_section(arguments.results, "device", device_section(json.loads(arguments.json.read_text())))


if __name__ == "__main__":
    main()
