"""How the command line says what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import typer

_HEARD: ContextVar[tuple[Callable[[str], object], ...]] = ContextVar("heard", default=())


def complain(message: str) -> None:
    """One line on stderr."""
    line = " ".join(message.split())
    for hear in _HEARD.get():
        hear(line)
    typer.echo(f"chairlift: {line}", err=True)


@contextmanager
def heard(hear: Callable[[str], object]) -> Iterator[None]:
    """What is complained of within is told to `hear`, too."""
    token = _HEARD.set((*_HEARD.get(), hear))
    try:
        yield
    finally:
        _HEARD.reset(token)
