"""How the command line says what went wrong."""

from __future__ import annotations

import typer


def complain(message: str) -> None:
    """One line on stderr."""
    typer.echo(f"chairlift: {' '.join(message.split())}", err=True)
