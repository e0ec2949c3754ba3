"""Chairlift against other servers on this machine: `make bench`.

Each server in turn gets the same model folder, the same Python, a free port and the same requests, and is
ended before the next one starts. The result is the `compare` section of bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine, package_version, revision
from peers import PEERS, CompareError, Peer, peak_memory, serving
from results import RESULTS, table, write_section
from rich.console import Console

from chairlift.engine.errors import EngineError
from chairlift.server.bench import BenchError, BenchOptions, BenchReport, Workload, print_report, run_bench
from chairlift.server.bench.report import RequestReport, Spread, WorkloadReport, spread_cell


@dataclass(frozen=True)
class Run:
    """What one peer came to."""

    peer: str
    report: BenchReport
    ready_s: float
    """From the start of the process until it said that it is ready."""
    peak_memory_bytes: int | None
    """Largest resident size of the process; None where the system does not tell."""


def measure(peer: Peer, folder: Path, arguments: argparse.Namespace, console: Console) -> Run:
    console.print(f"{peer.name}: starting")
    with serving(peer, folder) as (process, url, ready):
        report = run_bench(
            BenchOptions(
                url=url,
                workload=arguments.workload,
                clients=arguments.clients,
                max_tokens=arguments.max_tokens,
                requests=arguments.requests,
                rate=arguments.rate,
                seed=arguments.seed,
                model=peer.model,
            )
        )
        run = Run(peer.name, report, ready, peak_memory(process.pid))
    print_report(report, console)
    return run


# What is written


def section(runs: Sequence[Run], arguments: argparse.Namespace) -> str:
    model = "the embedded default" if arguments.model is None else arguments.model.name
    parts = [
        "## Against other servers",
        f"`python bench/compare.py {shlex.join(shown_arguments(arguments))}`",
        f"{machine()}. {versions(runs)}. Model: {model}. Every server got the same requests. Times are "
        "p50 / p95 / max; the last ITL figure is the longest stall.",
    ]
    names = list(runs[0].report.workloads)
    parts.append(
        table(
            [
                "workload",
                "server",
                "tok/s",
                "TTFT",
                "ITL",
                "per token p50",
                "requests",
                "errors",
                "answer tok",
            ],
            [workload_row(name, run) for name in names for run in runs],
        )
    )
    if "mixed" in names:
        parts.append(
            table(
                ["mixed, by prompt", "server", "requests", "prompt tok", "TTFT", "longest gap", "end to end"],
                [kind_row(kind, run) for kind in ("short", "long") for run in runs],
            )
        )
    parts.append(
        table(
            ["process", "ready after", "peak memory GB"],
            [
                [
                    run.peer,
                    f"{run.ready_s:.1f}",
                    f"{run.peak_memory_bytes / 1e9:.2f}" if run.peak_memory_bytes else "–",
                ]
                for run in runs
            ],
        )
    )
    if len(runs) > 1:
        parts.append("\n".join(f"- {line}" for other in runs[1:] for line in ratios(runs[0], other)))
    notes = [
        f"- {run.peer}, {name}: {note}"
        for run in runs
        for name, workload in run.report.workloads.items()
        for note in workload.notes
    ]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def workload_row(name: str, run: Run) -> list[str]:
    workload = run.report.workloads[name]
    return [
        name,
        run.peer,
        f"{workload.output_tokens_per_s:.1f}",
        spread_cell(workload.ttft_s),
        spread_cell(workload.itl_s),
        "–" if workload.tpot_s is None else f"{workload.tpot_s.p50:.3g}",
        str(workload.requests),
        str(sum(workload.errors.values())),
        str(workload.completion_tokens),
    ]


def kind_row(kind: str, run: Run) -> list[str]:
    requests = of_kind(run.report.workloads["mixed"], kind)
    prompts = [request.prompt_tokens for request in requests if request.prompt_tokens is not None]
    gaps = [request.longest_gap_s for request in requests if request.longest_gap_s is not None]
    return [
        kind,
        run.peer,
        str(len(requests)),
        f"{min(prompts)}–{max(prompts)}" if prompts else "–",
        spread_cell(Spread.of(request.ttft_s for request in requests if request.ttft_s is not None)),
        spread_cell(Spread.of(gaps)),
        spread_cell(Spread.of(request.e2e_s for request in requests)),
    ]


def of_kind(workload: WorkloadReport, kind: str) -> list[RequestReport]:
    return [request for request in workload.details if request.kind == kind and request.error is None]


def ratios(ours: Run, theirs: Run) -> list[str]:
    """One line a workload, of what the issue asks: throughput, and the longest stall."""
    lines = []
    for name, workload in ours.report.workloads.items():
        other = theirs.report.workloads[name]
        if not (workload.succeeded and other.succeeded):
            continue
        said = [f"tok/s {workload.output_tokens_per_s / other.output_tokens_per_s:.2f} ×"]
        if workload.itl_s and other.itl_s and workload.itl_s.max > 0:
            said.append(f"longest stall {other.itl_s.max / workload.itl_s.max:.1f} × shorter")
        if workload.ttft_s and other.ttft_s and workload.ttft_s.p50 > 0:
            said.append(f"TTFT p50 {other.ttft_s.p50 / workload.ttft_s.p50:.1f} × shorter")
        lines.append(
            f"{name}: {ours.peer} against {theirs.peer}: {', '.join(said)}; {same_answers(workload, other)}"
        )
    return lines


def same_answers(ours: WorkloadReport, theirs: WorkloadReport) -> str:
    """Greedy answers to the same requests should be the same text."""
    pairs = [
        (one.text, two.text)
        for one, two in zip(ours.details, theirs.details, strict=True)
        if one.error is None and two.error is None
    ]
    return f"{sum(one == two for one, two in pairs)} of {len(pairs)} answers the same"


def shown_arguments(arguments: argparse.Namespace) -> list[str]:
    """The settings that change the requests, for whoever repeats the run."""
    shown = [
        *("--workload", str(arguments.workload), "--clients", str(arguments.clients)),
        *("--max-tokens", str(arguments.max_tokens), "--rate", f"{arguments.rate:g}"),
        *("--seed", str(arguments.seed)),
    ]
    return shown + (["--requests", str(arguments.requests)] if arguments.requests is not None else [])


def versions(runs: Sequence[Run]) -> str:
    measured = {peer.package for peer in PEERS if peer.name in {run.peer for run in runs}}
    packages = ["mlx", *sorted(measured | {"mlx-lm"} - {"chairlift"})]
    said = [f"{name} {package_version(name)}" for name in packages if name != "chairlift"]
    return ", ".join(
        [*said, f"chairlift {package_version('chairlift')} ({revision() or 'no revision known'})"]
    )


def model_folder(model: Path | None) -> Path:
    """The folder that every server is given: `model`, or the embedded default, fetched and converted once."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise CompareError(f"{model} is no model folder: it holds no config.json.")
        return model
    from chairlift.engine.models.resolve import resolve_model

    return resolve_model(None).folder


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder; the embedded default if not given")
    parser.add_argument(
        "--peers", nargs="+", choices=names, default=names, help="the first is compared to the others"
    )
    parser.add_argument("--workload", type=Workload, choices=list(Workload), default=Workload.ALL)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second in mixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every figure there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print the section and leave RESULTS.md alone")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse()
    console = Console()
    try:
        folder = model_folder(arguments.model)
        runs = [
            measure(peer, folder, arguments, console)
            for name in arguments.peers
            for peer in PEERS
            if peer.name == name and peer.installed
        ]
        if not runs:
            raise CompareError("None of the servers asked for is installed.")
    except (CompareError, BenchError, EngineError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    text = section(runs, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    print(text)
    if not arguments.dry_run:
        write_section(arguments.results, "compare", text)
    return 0 if all(run.report.ok for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
