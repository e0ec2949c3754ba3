"""`chairlift doctor`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.engine.quantities import size
from chairlift.server.configuration.flags import option
from chairlift.server.configuration.read import Outcome
from chairlift.server.diagnosis import Finding, Level, diagnose

if TYPE_CHECKING:
    from chairlift.engine.doctor import Examination

JSON = option("json", bool, typer.Option(False, "--json", help="Print one JSON object."))
VERBOSE = option(
    "verbose", bool, typer.Option(False, "--verbose", "-v", help="List every change to what is installed.")
)


def doctor(outcome: Outcome, *, json: bool, verbose: bool) -> int:
    """Show what Chairlift finds on this machine, how it changes what is installed, and whether `chairlift
    serve` would work with the same options. Exit code 1 if it would not."""
    from chairlift.engine.doctor import examine

    found = examine()
    findings = diagnose(outcome.configuration, found)
    if json:
        typer.echo(as_json(found, findings))
    else:
        console = Console(highlight=False)
        show(found, console, verbose=verbose)
        show_findings(findings, console)
    return 1 if any(finding.level is Level.FAULT for finding in findings) else 0


def as_json(found: Examination, findings: Sequence[Finding]) -> str:
    told = {**asdict(found), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(told, indent=1, default=lambda value: str(value) if isinstance(value, Path) else None)


def show(found: Examination, console: Console, *, verbose: bool = False) -> None:
    """Print an examination. Args: verbose: with every patch, not only those that do not fit."""
    versions = ", ".join(f"{name} {installed or 'absent'}" for name, installed in found.versions.items())
    lines = {
        "versions": versions,
        "python": found.python,
        "device": f"{found.backend}, {found.device}",
        "memory": _memory(found),
        "cache": f"{found.cache_folder} ({size(found.cache_bytes)})",
    }
    if found.wired_limit_mb is not None:
        limit = f"{found.wired_limit_mb:,} MiB" if found.wired_limit_mb else "the system's own choice"
        lines["wired"] = f"{limit} (iogpu.wired_limit_mb)"
    if found.openblas is not None:
        lines["BLAS"] = "OpenBLAS" if found.openblas else "reference BLAS"
    lines["patches"] = _patches(found, verbose)
    for title, text in lines.items():
        console.print(f"{title:9}{text}", soft_wrap=True, markup=False)
    changes = [change for change in found.changes if verbose or not change.ordinary]
    if not changes:
        return
    table = Table("package", "change", "state", "why", box=None, pad_edge=False)
    for change in changes:
        state = f"{change.state}, needless?" if change.needless else change.state
        table.add_row(*map(Text, (change.upstream, change.name, state, change.why)))
    console.print()
    console.print(table)


def _patches(found: Examination, verbose: bool) -> str:
    """How many there are, in one line."""
    states = [change.state for change in found.changes]
    applied, demand = states.count("applied"), states.count("on demand")
    text = f"{applied} of {applied + states.count('not applied')} in place"
    if demand:
        text += f", {demand} more on demand"
    return text if verbose else f"{text} (--verbose lists them)"


def _memory(found: Examination) -> str:
    if found.memory_bytes is None:
        return "unknown"
    text = size(found.memory_bytes)
    if found.working_set_bytes is not None:
        text += f", of which {size(found.working_set_bytes)} may be in use at once"
    if found.usable_bytes:
        text += f"; a server uses up to {size(found.usable_bytes)}"
    return text


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    console.print()
    console.print("chairlift serve with these options:", soft_wrap=True, markup=False)
    for finding in findings:
        line = Text(f"{finding.level:9}", STYLES[finding.level])
        console.print(line.append(f"{finding.what:13}{finding.text}", "none"), soft_wrap=True)
