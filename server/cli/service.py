"""`chairlift service`"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from chairlift.server.complaint import complain
from chairlift.server.log_file import newest_lines
from chairlift.server.service import operations
from chairlift.server.service.arguments import outcome_of
from chairlift.server.service.commands import Commands, SystemCommands
from chairlift.server.service.define import Wanted, define, unreadable
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.launchd import Launchd
from chairlift.server.service.operations import Service, Wait, waiting
from chairlift.server.service.places import Person, Platform, operator, person, places, this_platform
from chairlift.server.service.process import run_service
from chairlift.server.service.readiness import Waited
from chairlift.server.service.record import RecordFile
from chairlift.server.service.status import lines, status
from chairlift.server.service.supervisor import Supervisor
from chairlift.server.service.systemd import Systemd

SHOWN_LINES = 20
"""Of the log, where a service does not come up."""

Name = Annotated[
    str,
    typer.Option(
        help="Of several services on one machine.", show_default=False, callback=lambda name: _name(name)
    ),
]
System = Annotated[
    bool, typer.Option("--system", help="The machine's own service, started with it; needs root.")
]
WaitS = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait until it answers; 0: do not wait.")
]

app = typer.Typer(
    help="Keep `chairlift serve` running: with launchd on macOS, with systemd on Linux.", no_args_is_help=True
)


def _name(name: str) -> str:
    if not name.replace("-", "").isalnum() or not name.isascii() or name.startswith("-"):
        raise typer.BadParameter("A name has letters, digits and hyphens.")
    return name


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ServiceFault as fault:
        raise TyperException(fault.message) from None


def commands() -> Commands:
    return SystemCommands()


def _service(
    name: str, *, system: bool, user: str | None = None, platform: Platform | None = None
) -> Service:
    platform = platform or this_platform()
    who: Person | None
    if not system:
        who = person()
    elif user is not None:
        who = person(user)
    elif platform is Platform.LAUNCHD:
        who = person(operator())
    else:
        who = None
    home, uid = (who.home, who.uid) if who is not None else (Path("/"), 0)
    supervisor: Supervisor
    if platform is Platform.LAUNCHD:
        supervisor = Launchd(commands(), name=name, system=system, home=home, uid=uid)
    else:
        supervisor = Systemd(commands(), name=name, system=system, home=home)
    return Service(name, supervisor, places(platform, name, who, os.environ), system, who)


@app.command()
def install(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Flags of `chairlift serve`, after two hyphens."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A file of settings, as for `chairlift serve`."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Show what would be written, and change nothing.")
    ] = False,
    platform: Annotated[
        Platform | None, typer.Option(help="With --print: for the other system.", show_default=False)
    ] = None,
    system: System = False,
    user: Annotated[
        str | None,
        typer.Option(
            help="With --system: whom it runs as. By default, on macOS you, on Linux a user made for it."
        ),
    ] = None,
    name: Name = "chairlift",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable of its environment; repeatable."),
    ] = None,
    wait: WaitS = 300.0,
) -> int:
    """Write the service's definition, start it, and wait until it answers."""
    if platform is not None and not show:
        raise typer.BadParameter("It goes with --print.", param_hint="--platform")
    if user is not None and not system:
        raise typer.BadParameter("It goes with --system.", param_hint="--user")
    given = ["--config", str(config)] if config is not None else []
    outcome = outcome_of([*given, *(words or ())])
    with _told():
        platform = platform or this_platform()
        service = _service(name, system=system, user=user, platform=platform)
        if service.who is not None and service.who.uid == 0 and platform is Platform.LAUNCHD and not show:
            raise ServiceFault("It would run as root: install it as yourself, or with --system --user NAME.")
        wanted = Wanted(platform, name, system, service.who, outcome, _variables(env or []), Path.cwd())
        definition = define(wanted)
        fault = unreadable(definition)
        if show:
            if fault is not None:
                complain(fault)
            typer.echo(service.supervisor.text(definition), nl=False)
            return 0
        if fault is not None:
            raise ServiceFault(fault)
        return _come_up(service, lambda ready: operations.install(service, definition, ready), wait)


def _variables(given: list[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.replace("_", "").isalnum():
            raise typer.BadParameter(f"{name!r} is not of the form NAME=VALUE.", param_hint="--env")
        found[name] = value
    return found


def _come_up(service: Service, act: Callable[[Wait], Waited], wait_s: float) -> int:
    waited = act(waiting(wait_s))
    where = f"{service.supervisor.name}, {service.supervisor.file}"
    if waited.url is not None:
        typer.echo(f"The service {service.name} answers at {waited.url}/v1 ({where}).")
        return 0
    if not waited.why:
        typer.echo(f"The service {service.name} is started ({where}).")
        return 0
    typer.echo(f"The service {service.name} is not ready ({where}).", err=True)
    log = service.places.log(service.name)
    for line in newest_lines(log, SHOWN_LINES) if log is not None else ():
        typer.echo(f"  {line}", err=True)
    raise TyperException(waited.why)


@app.command()
def uninstall(system: System = False, name: Name = "chairlift") -> int:
    """Stop the service and remove its definition. Models, caches and logs stay."""
    with _told():
        service = _service(name, system=system)
        operations.uninstall(service)
        typer.echo(f"Removed {service.supervisor.file}. Logs and caches are left where they are.")
    return 0


@app.command()
def start(system: System = False, name: Name = "chairlift", wait: WaitS = 300.0) -> int:
    """Start the service, and wait until it answers."""
    with _told():
        service = _service(name, system=system)
        return _come_up(service, lambda ready: operations.start(service, ready), wait)


@app.command()
def stop(system: System = False, name: Name = "chairlift") -> int:
    """Stop the service: running answers finish first. It stays installed."""
    with _told():
        operations.stop(_service(name, system=system))
        typer.echo(f"The service {name} is stopped.")
    return 0


@app.command()
def restart(system: System = False, name: Name = "chairlift", wait: WaitS = 300.0) -> int:
    """Stop the service, start it again, and wait until it answers."""
    with _told():
        service = _service(name, system=system)
        return _come_up(service, lambda ready: operations.restart(service, ready), wait)


@app.command("status")
def show_status(
    system: System = False,
    name: Name = "chairlift",
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> int:
    """Tell how the service is doing. Exit code 0: ready, 1: not ready, 3: not running, 4: not installed."""
    with _told():
        found = status(_service(name, system=system), time.time())
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        for title, text in lines(found):
            typer.echo(f"{title:10}{text}")
    return found.code


@app.command()
def logs(
    system: System = False,
    name: Name = "chairlift",
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="Newest lines to show.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")
    ] = False,
) -> int:
    """Show the service's log."""
    with _told():
        service = _service(name, system=system)
        service.supervisor.logs(count, follow=follow)
        log = service.places.log(name)
        if log is None or not log.exists():
            raise ServiceFault(f"There is no log yet ({log}).")
        if follow:
            commands().become(["tail", "-n", str(count), "-F", str(log)])
        for line in newest_lines(log, count):
            typer.echo(line)
    return 0


@app.command(hidden=True)
def run(
    words: Annotated[list[str] | None, typer.Argument()] = None,
    record: Annotated[Path, typer.Option()] = Path("chairlift.json"),
    output: Annotated[Path | None, typer.Option()] = None,
    gave_up_exit: Annotated[int, typer.Option()] = 0,
) -> int:
    """What the supervisor runs: `chairlift serve`, and a note of what becomes of it."""
    from chairlift.server.cli.app import run as serve

    return run_service(serve, words or (), RecordFile(record), output=output, gave_up_exit=gave_up_exit)
