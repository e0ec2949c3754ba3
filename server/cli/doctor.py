"""`chairlift doctor`"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from chairlift.engine.doctor import Examination

GIBIBYTE = 2**30
MEBIBYTE = 2**20


def doctor() -> None:
    """Show what Chairlift finds on this machine, and how it changes what is installed."""
    from chairlift.engine.doctor import examine

    show(examine(), Console(highlight=False))


def show(found: Examination, console: Console) -> None:
    """Print an examination."""
    versions = ", ".join(f"{name} {installed or 'absent'}" for name, installed in found.versions.items())
    memory = "unknown" if found.memory_bytes is None else f"{found.memory_bytes / GIBIBYTE:.1f} GiB"
    if found.working_set_bytes is not None:
        memory += f", of which {found.working_set_bytes / GIBIBYTE:.1f} GiB may be in use at once"
    lines = {
        "versions": versions,
        "python": found.python,
        "device": f"{found.backend}, {found.device}",
        "memory": memory,
        "cache": f"{found.cache_folder} ({found.cache_bytes / MEBIBYTE:.1f} MiB)",
    }
    if found.openblas is not None:
        lines["BLAS"] = (
            "OpenBLAS"
            if found.openblas
            else "reference BLAS, about 15 times slower: install libopenblas0-pthread and set "
            "LD_PRELOAD=libopenblas.so.0"
        )
    for title, text in lines.items():
        console.print(f"{title:9}{text}", soft_wrap=True, markup=False)
    table = Table("package", "change", "state", "why", box=None, pad_edge=False)
    for change in found.changes:
        table.add_row(change.upstream, change.name, change.state, change.why)
    console.print()
    console.print(table)
