"""What `against.py` writes of the servers that it measured."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import machine, revision
from peers import PEERS, Peer
from results import table

from chairlift.server.bench.report import RequestReport, Spread, WorkloadReport, spread_cell

GGUF_NOTE = "llama.cpp is another engine and reads the 4-bit file that the folder was made from"


@dataclass
class Standing:
    """What has become of one server so far."""

    peer: Peer
    python: Path | None = None
    model: Path | None = None
    """What it serves."""
    versions: str = ""
    workloads: dict[str, WorkloadReport] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """By workload, why it was not measured."""
    failed: str = ""
    """Why nothing was measured: it did not install, or did not start."""
    ready_s: list[float] = field(default_factory=list)
    """Of each start, seconds until the server said that it is ready."""
    peak_memory_bytes: int = 0
    """Largest resident size of all its processes; 0 where the system does not tell."""

    @property
    def title(self) -> str:
        return self.peer.name + (" (4-bit GGUF)" if self.peer.gguf else "")

    def why_not(self, workload: str) -> str:
        return self.failed or self.reasons.get(workload, "not measured")


@dataclass(frozen=True)
class Figure:
    """One number that Chairlift is held against the best of the others in."""

    workload: str
    name: str
    of: Callable[[WorkloadReport], float | None]
    aim: float
    """Of Chairlift's over the best other's: at least, where more is better, else at most."""
    more_is_better: bool = False


def of_kind(workload: WorkloadReport, kind: str) -> list[RequestReport]:
    return [request for request in workload.details if request.kind == kind and request.error is None]


def same_answers(ours: WorkloadReport, theirs: WorkloadReport) -> str:
    """Greedy answers to the same requests should be the same text: `3 of 4`."""
    pairs = [
        (one.text, two.text)
        for one, two in zip(ours.details, theirs.details, strict=True)
        if one.error is None and two.error is None
    ]
    return f"{sum(one == two for one, two in pairs)} of {len(pairs)}"


def throughput(workload: WorkloadReport) -> float | None:
    return workload.output_tokens_per_s or None


def first_token_of_short_prompts(workload: WorkloadReport) -> float | None:
    spread = Spread.of(each.ttft_s for each in of_kind(workload, "short") if each.ttft_s is not None)
    return spread.p95 if spread else None


FIGURES = (
    Figure("batch", "tok/s", throughput, 1.1, more_is_better=True),
    Figure("mixed", "tok/s", throughput, 1.3, more_is_better=True),
    Figure("mixed", "TTFT p95 of short prompts", first_token_of_short_prompts, 0.3),
    Figure("turns", "tok/s", throughput, 1.5, more_is_better=True),
    Figure("turns", "TTFT p50", lambda workload: workload.ttft_s.p50 if workload.ttft_s else None, 0.5),
)


def section(
    standings: Sequence[Standing], arguments: argparse.Namespace, seconds: float, *, cut: bool = False
) -> str:
    """The Markdown; Chairlift is the first of `standings`. `cut`: the run was ended early."""
    model = "the embedded default" if arguments.model is None else arguments.model.name
    said = [each.versions for each in standings if each.versions]
    said[0] += f" at {revision(arguments.revision)}"
    names = [
        name for name in ("solo", "batch", "mixed", "turns") if any(name in s.workloads for s in standings)
    ]
    conditions = [
        f"{machine()}.",
        f"{'; '.join(said)}.",
        f"Model: {model}, the same folder and the same requests for all"
        + (f"; {GGUF_NOTE}." if any(each.peer.gguf for each in standings) else "."),
        "All servers do one workload in turn, each freshly started, before the next workload begins.",
        "Times are p50 / p95 / max in seconds; the last ITL figure is the longest stall.",
        "Same: greedy answers equal to Chairlift's.",
        f"The run {'was ended after' if cut else 'took'} {seconds / 60:.0f} minutes.",
    ]
    parts = [
        f"## Servers in turn: {', '.join(each.peer.name for each in standings)}",
        f"`python bench/against.py {shlex.join(shown_arguments(arguments))}`",
        " ".join(conditions),
        table(
            ["workload", "server", "tok/s", "TTFT", "ITL", "requests", "errors", "answer tok", "same"],
            [row(name, each, standings[0]) for name in names for each in standings],
        ),
    ]
    if "mixed" in names:
        parts.append(
            table(
                ["mixed, by prompt", "server", "requests", "TTFT", "longest gap", "end to end"],
                [
                    kind_row(kind, each)
                    for kind in ("short", "long")
                    for each in standings
                    if "mixed" in each.workloads
                ],
            )
        )
    parts.append(table(["process", "ready after", "peak memory GB"], [process_row(s) for s in standings]))
    against = [line for figure in FIGURES if (line := against_best(figure, standings))]
    if against:
        parts.append(table(["against the best other on MLX", "chairlift", "best", "ratio", "aim"], against))
    notes = [f"- {each.title}: {each.failed}" for each in standings if each.failed]
    notes += [
        f"- {each.title}, {name}: {note}"
        for each in standings
        for name in names
        for note in ([each.reasons[name]] if name in each.reasons else [])
        + (each.workloads[name].notes if name in each.workloads else [])
    ]
    return "\n\n".join([*parts, "\n".join(notes)] if notes else parts)


def shown_arguments(arguments: argparse.Namespace) -> list[str]:
    """The settings that change what is measured, for whoever repeats the run."""
    return [
        *([] if arguments.peers == [peer.name for peer in PEERS] else ["--peers", *arguments.peers]),
        *("--requests", *arguments.requests),
        *("--clients", str(arguments.clients), "--max-tokens", str(arguments.max_tokens)),
        *("--rate", f"{arguments.rate:g}", "--seed", str(arguments.seed)),
    ]


def row(name: str, standing: Standing, ours: Standing) -> list[str]:
    workload = standing.workloads.get(name)
    if workload is None:
        return [name, standing.title, f"none: {standing.why_not(name)}", *["–"] * 6]
    own = ours.workloads.get(name)
    return [
        name,
        standing.title,
        f"{workload.output_tokens_per_s:.1f}",
        spread_cell(workload.ttft_s),
        spread_cell(workload.itl_s),
        str(workload.requests),
        str(sum(workload.errors.values())),
        str(workload.completion_tokens),
        "–" if own is None or standing is ours else same_answers(own, workload),
    ]


def kind_row(kind: str, standing: Standing) -> list[str]:
    requests = of_kind(standing.workloads["mixed"], kind)
    return [
        kind,
        standing.title,
        str(len(requests)),
        spread_cell(Spread.of(each.ttft_s for each in requests if each.ttft_s is not None)),
        spread_cell(Spread.of(each.longest_gap_s for each in requests if each.longest_gap_s is not None)),
        spread_cell(Spread.of(each.e2e_s for each in requests)),
    ]


def process_row(standing: Standing) -> list[str]:
    ready, peak = Spread.of(standing.ready_s), standing.peak_memory_bytes
    return [standing.title, spread_cell(ready), f"{peak / 1e9:.2f}" if peak else "–"]


def against_best(figure: Figure, standings: Sequence[Standing]) -> list[str] | None:
    """Chairlift's figure over the best of the servers on MLX that answered every request; None where there
    is no such pair."""
    ours, *others = standings
    known = {
        each.title: value
        for each in others
        if not each.peer.gguf
        and (workload := each.workloads.get(figure.workload)) is not None
        and not workload.errors
        and (value := figure.of(workload)) is not None
    }
    own = ours.workloads.get(figure.workload)
    value = None if own is None else figure.of(own)
    if not known or value is None:
        return None
    best = (max if figure.more_is_better else min)(known, key=lambda title: known[title])
    aim = f"{'≥' if figure.more_is_better else '≤'} {figure.aim:g}"
    name = f"{figure.workload}, {figure.name}"
    return [name, f"{value:.3g}", f"{best} {known[best]:.3g}", f"{value / known[best]:.2f}", aim]
