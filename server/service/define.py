"""From what an operator asks for to the definition of a service."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from chairlift.server.configuration.models import split_name
from chairlift.server.configuration.read import Outcome
from chairlift.server.configuration.types import store_path
from chairlift.server.service.arguments import check_private, secret_files, serve_words
from chairlift.server.service.definition import GAVE_UP, STOP_S, Credential, ServiceDefinition
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.places import Person, Places, Platform, places

CARRIED = (
    "HF_ENDPOINT",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE",
)
"""Variables of the operator's that a service gets as they are, where they are set."""
CARRIED_TO_SYSTEMD = ("LD_PRELOAD",)
"""The same, of Linux alone: launchd's service is another machine's where it is only printed here."""
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
UNWRITABLE = re.compile("[\\x00-\\x08\\x0a-\\x1f\\x7f\\ud800-\\udfff]")
"""systemd takes a carriage return for the end of a line, and XML has no control characters."""
STOP_BEYOND_DRAIN_S = 60
"""Seconds to stop beyond those in which running answers finish."""
WATCHDOG_BEYOND_S = 60
"""Seconds after which the supervisor ends a process that could not end itself."""
OPENBLAS = "libopenblas.so.0"
MODPROBE = Path("/usr/bin/nvidia-modprobe")


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    Attributes:
        platform: in whose language.
        name: of the service.
        system: started with the machine.
        who: whom it runs as; None: a user that systemd makes for it.
        outcome: the settings it serves with.
        variables: more environment.
        here: where relative paths begin.
    """

    platform: Platform
    name: str
    system: bool
    who: Person | None
    outcome: Outcome
    variables: Mapping[str, str]
    here: Path


def define(wanted: Wanted, environment: Mapping[str, str] = os.environ) -> ServiceDefinition:
    """
    Raises:
        ServiceFault: it cannot be as asked.
    """
    where = places(wanted.platform, wanted.name, wanted.who, environment)
    configuration = wanted.outcome.configuration
    words = serve_words(wanted.outcome, wanted.here)
    log = where.log(wanted.name)
    if log is not None and configuration.log_file is None:
        words = (*words, "--log-file", str(log))
    systemd = wanted.platform is Platform.SYSTEMD
    secrets = dict(secret_files(wanted.outcome, wanted.here))
    for name, path in secrets.items():
        if "key" in name:
            check_private(path)
    if systemd and wanted.system:
        # Those that the file of settings names as well: a flag says where they are, and goes before the file.
        for name, path in secrets.items():
            if name != "config" and str(path) not in words:
                words = (*words, "--" + name.rstrip("-0123456789"), str(path))
    output = where.output(wanted.name)
    if not math.isfinite(configuration.drain_timeout):
        raise ServiceFault("--drain-timeout: a service must be told how long its end may take.")
    service = ServiceDefinition(
        name=wanted.name,
        program=_program(where, wanted.name, output, gave_up=GAVE_UP if systemd else 0),
        serve=words,
        system=wanted.system,
        user=wanted.who.name if wanted.system and wanted.who is not None else None,
        home=where.home,
        working_folder=where.state,
        environment=_environment(wanted, where, environment),
        output=output,
        folders=_folders(wanted, where),
        credentials=tuple(
            Credential(name, path) for name, path in secrets.items() if systemd and wanted.system
        ),
        low_port=0 < configuration.port < 1024,
        stop_s=max(STOP_S, round(configuration.drain_timeout) + STOP_BEYOND_DRAIN_S),
        watchdog_s=_watchdog_s(configuration.watchdog),
        before=(str(MODPROBE), "-c", "0", "-u") if systemd and wanted.system and MODPROBE.is_file() else (),
    )
    _check_writable(service)
    return service


def _watchdog_s(own: float) -> float:
    """The supervisor's, beside the process's own; 0: none."""
    return own + WATCHDOG_BEYOND_S if 0 < own < math.inf else 0.0


def _check_writable(service: ServiceDefinition) -> None:
    """Raises: ServiceFault: something in it would read otherwise once it is written down."""
    paths = (service.home, service.working_folder, *service.folders)
    for text in (*service.arguments, *service.environment.values(), *map(str, paths)):
        if UNWRITABLE.search(text):
            raise ServiceFault(
                f"{text!r} cannot be written into a service's definition: it has a control character or is "
                "no UTF-8."
            )


def interpreter() -> str:
    """This Python, by a path that outlives updates: Homebrew's `opt` instead of a version's own folder."""
    path = Path(sys.executable).absolute()
    parts = path.parts
    if "Cellar" in parts and len(parts) > (at := parts.index("Cellar")) + 3:
        lasting = Path(*parts[:at], "opt", parts[at + 1], *parts[at + 3 :])
        if lasting.exists():
            return str(lasting)
    return str(path)


def _program(where: Places, name: str, output: Path | None, *, gave_up: int) -> tuple[str, ...]:
    # -P: what lies in the working folder is not to be imported.
    words = [interpreter(), "-P", "-m", "chairlift", "service", "run", "--record", str(where.record(name))]
    if output is not None:
        words += ["--output", str(output)]
    if gave_up:
        words += ["--gave-up-exit", str(gave_up)]
    return (*words, "--")


def _environment(wanted: Wanted, where: Places, environment: Mapping[str, str]) -> dict[str, str]:
    for name in wanted.variables:
        if SECRET_NAME.search(name):
            raise ServiceFault(
                f"--env {name}: everybody on this machine can read a service's definition; secrets belong "
                "into a file that only its user can read."
            )
    found = {
        "HOME": str(where.home),
        "PATH": _path(wanted.platform),
        "CHAIRLIFT_CACHE": str(where.cache),
        "HF_HOME": str(where.huggingface),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Native faults leave the stacks of all threads behind.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
    }
    if wanted.who is None:
        # /tmp is the service's own and empty after each start: kernels would be compiled anew.
        found["MLX_PTX_CACHE_DIR"] = str(where.cache / "ptx")
        found["CUDA_CACHE_PATH"] = str(where.cache / "cuda")
    carried: tuple[str, ...] = CARRIED
    if wanted.platform is Platform.SYSTEMD:
        carried += CARRIED_TO_SYSTEMD
        if _computes_on_cpu() and has_openblas():
            found["LD_PRELOAD"] = OPENBLAS
    found |= {name: environment[name] for name in carried if environment.get(name)}
    found |= wanted.variables
    for name, value in found.items():
        if "\n" in value or "\0" in value or "=" in name or not name:
            raise ServiceFault(f"The variable {name!r} cannot be written into a service's definition.")
    return found


def _path(platform: Platform) -> str:
    """Where programs are found; a compiler, which MLX asks for on a CPU, included."""
    brew = ["/opt/homebrew/bin"] if platform is Platform.LAUNCHD else []
    system = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return os.pathsep.join(dict.fromkeys([str(Path(interpreter()).parent), *brew, *system]))


def _folders(wanted: Wanted, where: Places) -> tuple[Path, ...]:
    configuration = wanted.outcome.configuration
    store = store_path(configuration.responses_store)
    named = [
        configuration.prefix_cache_dir,
        configuration.log_file.parent if configuration.log_file is not None else None,
        store.parent if store is not None else None,
    ]
    own = [where.state, where.cache, where.huggingface, where.logs]
    if wanted.who is None:
        own = []  # systemd makes them, and what is below them
    folders = [*own, *(wanted.here / path for path in named if path is not None)]
    return tuple(dict.fromkeys(path for path in folders if path is not None))


def unreadable(service: ServiceDefinition) -> str | None:
    """Why the service could not read what it runs and serves, or None: a user made for it owns nothing."""
    if not service.system or service.user is not None:
        return None
    serve = service.serve
    models = [serve[at + 1] for at, word in enumerate(serve) if word in ("--model", "--embedding-model")]
    named = (service.program[0], *(split_name(text)[1] for text in models))
    for path in (Path(text) for text in named if text.startswith("/")):
        if path.exists() and (barrier := _barrier(path)) is not None:
            return (
                f"{path} cannot be read by a user made for the service, because of {barrier}. Name a user "
                "that can: --user NAME."
            )
    return None


def _barrier(path: Path) -> Path | None:
    """The first folder on the way, or the thing itself, that others may not enter or read."""
    real = path.resolve()
    for folder in reversed(real.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    needed = 0o005 if real.is_dir() else 0o004
    return None if real.stat().st_mode & needed == needed else real


def _computes_on_cpu() -> bool:
    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return False
    return True


def has_openblas() -> bool:
    """It is installed, whether or not this process has it."""
    folders = (Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu"))
    return any((folder / OPENBLAS).exists() for folder in folders)
