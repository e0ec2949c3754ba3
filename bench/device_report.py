"""What a run on an accelerator came to, in Markdown: of bench/device.py or of bench/device_http.py.

`python bench/device_report.py results/device.json` writes it into RESULTS.md, as the section of the file's
name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import RESULTS, table, write_section

DECODE_NOTE = """The bare step is the model's forward on a pre-filled batch cache of equal lengths, argmax,
one step of look-ahead; unmasked: the same on a cache that needs no mask. Steady: all rows decode. Joins: the
whole run from the first prompt to the last token, new rows taking the places of finished ones."""


def device_section(run: dict[str, Any]) -> str:
    """The Markdown of bench/device.py's JSON."""
    machine = run["machine"]
    parts = [
        "## One GPU, random weights",
        f"{machine['device']}, {machine['versions']}; chairlift {machine['revision']}. "
        f"`python bench/device.py {run['arguments']}`",
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


def _steady(part: dict[str, Any], bare: dict[tuple[str, int], float]) -> list[str]:
    rate, own = part.get("steady_tok_s"), bare.get((part["model"], part["streams"]))
    if not rate or part["part"] != "streams":
        return ["–", "–"]
    return [f"{rate:,.0f}", f"{rate / own:.2f}" if own else "–"]


def http_section(run: dict[str, Any]) -> str:
    """The Markdown of bench/device_http.py's JSON."""
    parts = [part for part in run["parts"] if part["part"] in ("streams", "joins")]
    bare = {(p["model"], p["streams"]): p["tok_s"] for p in run["parts"] if p["part"] == "bare"}
    rows = [
        [
            part["model"],
            f"{part['part']}, {part['streams']}",
            part["server"],
            _number(part.get("tok_s")),
            *_steady(part, bare),
            f"{part['ttft_p50']:.2f} / {part['ttft_max']:.2f}" if "ttft_p50" in part else "–",
            str(part.get("requests", 0)),
            str(part.get("failed", 0)),
        ]
        for part in parts
    ]
    machine = run["machine"]
    heading = [
        *("model", "work", "server", "tok/s", "while all decode", "of bare", "TTFT p50 / max"),
        *("requests", "failed"),
    ]
    text = [
        "## Over HTTP, one GPU, random weights",
        f"{machine['device']}, {machine['versions']}; chairlift {machine['revision']}. "
        f"`python bench/device_http.py {run['arguments']}`",
        table(heading, rows) if rows else "",
    ]
    turns = [part for part in run["parts"] if part["part"] == "turns" and "disk_s" in part]
    if turns:
        rows = [
            [
                f"{part['model']}, {part['tokens']:,} tokens",
                f"{part['cold_s']:.2f}",
                f"{part['ram_s']:.3f} ({part['ram_s'] / part['cold_s']:.1%})",
                f"{part['disk_s']:.3f} ({part['disk_s'] / part['cold_s']:.1%})",
            ]
            for part in turns
        ]
        text.append(table(["next turn, TTFT s", "cold", "from memory", "from disk, after a restart"], rows))
    failed = [part for part in run["parts"] if "why" in part]
    if failed:
        text.append(
            "\n".join(f"- {p['model']}, {p['server']}, {p['part']}: {p['why'][-200:]}" for p in failed)
        )
    return "\n\n".join(filter(None, text))


def section(run: dict[str, Any]) -> str:
    return http_section(run) if "parts" in run else device_section(run)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path, help="what the run wrote")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    run = json.loads(arguments.json.read_text())
    write_section(arguments.results, arguments.json.stem, section(run))


if __name__ == "__main__":
    main()
