"""`chairlift config`"""

from __future__ import annotations

import typer

from chairlift.server.configuration.read import Outcome
from chairlift.server.configuration.written import written


def config(outcome: Outcome) -> int:
    """Print the settings that `chairlift serve` would have with the same options, and where each comes from.

    The output is a configuration file. Secrets are not shown."""
    typer.echo(written(outcome), nl=False)
    return 0
