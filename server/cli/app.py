"""The command line. What goes wrong is one line on stderr and an exit code other than 0, never a traceback
(`CHAIRLIFT_TRACEBACK=1` shows that of a fault in Chairlift itself)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import TyperException

from chairlift.engine.errors import EngineError
from chairlift.server.cli import bench, config, doctor, generate, importing, serve, service, warm
from chairlift.server.complaint import complain
from chairlift.server.configuration.flags import configured

INTERRUPTED = 130

app = typer.Typer(
    name="chairlift",
    help="Serve local models with an OpenAI-compatible API and continuous batching, on MLX.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(configured(serve.serve))
app.command("config")(configured(config.config))
app.command("import")(importing.import_model)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("warm")(warm.warm)
app.command("doctor")(configured(doctor.doctor, doctor.JSON, doctor.VERBOSE))
app.add_typer(service.app, name="service")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chairlift {version('chairlift')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Without a command, the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (None: this process's) and return the exit code."""
    try:
        result = typer.main.get_command(app).main(
            None if arguments is None else list(arguments), prog_name="chairlift", standalone_mode=False
        )
        sys.stdout.flush()
    except TyperException as error:
        complain(error.format_message())
        return error.exit_code
    except EngineError as error:
        complain(error.message)
        return 1
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain about the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("CHAIRLIFT_TRACEBACK"):
            traceback.print_exc()
        complain(f"Internal error: {type(error).__name__}: {error}")
        return 1
    return result if isinstance(result, int) else 0
