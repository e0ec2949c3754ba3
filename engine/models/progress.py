"""Progress of something counted in bytes, on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_progress(title: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many of `total` bytes are done so far. Draws on stderr."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not shown,
    ) as progress:
        task = progress.add_task(title, total=total)

        def done(count: int) -> None:
            progress.update(task, completed=min(count, total))

        yield done
