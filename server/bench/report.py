"""Figures of a run: percentiles, JSON, and a table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chairlift.server.bench.client import Measured

SCHEMA = 1
"""Goes up whenever a field of the JSON changes its meaning."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Of the sorted values, the one `percent` of the way from the first to the last, by linear
    interpolation between neighbours (the definition of numpy's default).

    Raises:
        ValueError: no values, or `percent` outside 0..100.
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0..100, not {percent:g}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one measure, in seconds."""

    p50: float
    p95: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        known = list(values)
        if not known:
            return None
        return cls(percentile(known, 50), percentile(known, 95), max(known), len(known))


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request, in seconds from its own start."""

    kind: str
    max_tokens: int
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    longest_gap_s: float | None
    e2e_s: float
    finish_reason: str | None
    error: str | None
    text: str


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """What one workload came to. Failed requests count in `errors` alone."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    wall_s: float
    """From the workload's start to its last request's end."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the server says it had in its prefix cache; 0 where it does not say."""
    completion_tokens: int
    output_tokens_per_s: float
    """Completion tokens over `wall_s`."""
    chunks: int
    """Content chunks received; fewer than tokens where a server puts several tokens into one."""
    ttft_s: Spread | None
    itl_s: Spread | None
    """Gaps between content chunks, over all requests; `max` is the longest stall."""
    tpot_s: Spread | None
    """Time per output token after the first, one value a request: comparable between servers that
    chunk differently."""
    e2e_s: Spread | None
    finish_reasons: dict[str, int]
    notes: list[str]
    details: list[RequestReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BenchReport:
    url: str
    model: str
    seed: int
    clients: int
    max_tokens: int
    rate: float
    workloads: dict[str, WorkloadReport]
    schema: int = SCHEMA

    @property
    def ok(self) -> bool:
        """No request failed."""
        return not any(workload.errors for workload in self.workloads.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def summarize(measured: Sequence[Measured], wall: float) -> WorkloadReport:
    """The figures of the requests of one workload that took `wall` seconds."""
    good = [each for each in measured if each.error is None]
    bad = [each for each in measured if each.error is not None]
    completion = sum(each.tokens for each in good)
    return WorkloadReport(
        requests=len(measured),
        succeeded=len(good),
        errors=dict(sorted(Counter(each.error for each in bad if each.error).items())),
        wall_s=wall,
        prompt_tokens=sum(each.prompt_tokens or 0 for each in good),
        cached_tokens=sum(each.cached_tokens or 0 for each in good),
        completion_tokens=completion,
        output_tokens_per_s=completion / wall if wall > 0 else 0.0,
        chunks=sum(len(each.chunk_times) for each in good),
        ttft_s=Spread.of(each.ttft for each in good if each.ttft is not None),
        itl_s=Spread.of(gap for each in good for gap in each.gaps),
        tpot_s=Spread.of(each.seconds_per_token for each in good if each.seconds_per_token is not None),
        e2e_s=Spread.of(each.e2e for each in good),
        finish_reasons=dict(sorted(Counter(str(each.finish_reason) for each in good).items())),
        notes=_notes(good, bad),
        details=[_detail(each) for each in measured],
    )


def _notes(good: Sequence[Measured], bad: Sequence[Measured]) -> list[str]:
    notes = []
    uncounted = sum(each.completion_tokens is None for each in good)
    if uncounted:
        notes.append(f"{uncounted} answers came without usage: their tokens are counted by chunks.")
    counted = [each for each in good if each.completion_tokens is not None and each.chunk_times]
    tokens = sum(each.tokens for each in counted)
    chunks = sum(len(each.chunk_times) for each in counted)
    if chunks and tokens > 1.2 * chunks:
        notes.append(f"{tokens / chunks:.1f} tokens a chunk: ITL is between chunks, not between tokens.")
    empty = sum(not each.chunk_times for each in good)
    if empty:
        notes.append(f"{empty} answers were empty.")
    short = sum(each.finish_reason != "length" for each in good)
    if short:
        notes.append(f"{short} answers ended before max_tokens.")
    seen: set[str] = set()
    for each in bad:
        if each.error and each.error not in seen:
            seen.add(each.error)
            notes.append(f"{each.error}: {each.detail}")
    return notes


def _detail(each: Measured) -> RequestReport:
    return RequestReport(
        kind=each.kind,
        max_tokens=each.max_tokens,
        prompt_tokens=each.prompt_tokens,
        completion_tokens=each.completion_tokens,
        ttft_s=each.ttft,
        longest_gap_s=max(each.gaps, default=None),
        e2e_s=each.e2e,
        finish_reason=each.finish_reason,
        error=each.error,
        text=each.text,
    )


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """A table of the run, one column a workload, and its notes below."""
    console = console or Console()
    table = Table(title=escape(f"{report.url} · {report.model or 'no model name'} · seed {report.seed}"))
    table.add_column("")
    for name in report.workloads:
        table.add_column(name, justify="right")
    for label, cell in _LINES:
        table.add_row(label, *(cell(workload) for workload in report.workloads.values()))
    console.print(table)
    for name, workload in report.workloads.items():
        for note in workload.notes:
            console.print(escape(f"{name}: {note}"), highlight=False)


def _seconds(measure: str, figure: str) -> Callable[[WorkloadReport], str]:
    def cell(workload: WorkloadReport) -> str:
        spread: Spread | None = getattr(workload, measure)
        return "–" if spread is None else f"{getattr(spread, figure):.3f}"

    return cell


_LINES: tuple[tuple[str, Callable[[WorkloadReport], str]], ...] = (
    ("requests", lambda workload: str(workload.requests)),
    ("failed", lambda workload: str(sum(workload.errors.values()))),
    ("prompt tokens", lambda workload: str(workload.prompt_tokens)),
    ("of them cached", lambda workload: str(workload.cached_tokens)),
    ("answer tokens", lambda workload: str(workload.completion_tokens)),
    ("tok/s", lambda workload: f"{workload.output_tokens_per_s:.1f}"),
    ("TTFT p50, s", _seconds("ttft_s", "p50")),
    ("TTFT p95", _seconds("ttft_s", "p95")),
    ("TTFT max", _seconds("ttft_s", "max")),
    ("ITL p50, s", _seconds("itl_s", "p50")),
    ("ITL p95", _seconds("itl_s", "p95")),
    ("longest stall", _seconds("itl_s", "max")),
    ("per token p50, s", _seconds("tpot_s", "p50")),
    ("per token p95", _seconds("tpot_s", "p95")),
)


def spread_cell(spread: Spread | None) -> str:
    """`p50 / p95 / max` in seconds, three digits each."""
    return "–" if spread is None else " / ".join(f"{x:.3g}" for x in (spread.p50, spread.p95, spread.max))
