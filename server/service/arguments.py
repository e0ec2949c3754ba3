"""What a service is to serve: the flags of `chairlift serve`, checked as `serve` checks them, and spelled so
that they mean the same where nobody's shell, home or folder stands behind them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException

from chairlift.server.configuration.fields import Configuration, about, flag_of, is_secret
from chairlift.server.configuration.flags import configured
from chairlift.server.configuration.models import ModelTable, split_name
from chairlift.server.configuration.read import Outcome
from chairlift.server.configuration.types import store_path
from chairlift.server.service.errors import ServiceFault

NO_FILE = Path("/dev/null")
"""Without a file of settings: the service is not to find one that its operator did not mean."""
MODELS = ("model", "embedding_model")
"""Settings that name a folder, a file, or what is on no disk yet."""
PUBLIC = stat.S_IRWXG | stat.S_IRWXO


def outcome_of(words: Sequence[str]) -> Outcome:
    """The settings that `chairlift serve WORDS` would have here and now.

    Raises:
        TyperException: as `serve` would.
    """
    found: list[Outcome] = []

    def keep(outcome: Outcome) -> int:
        found.append(outcome)
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(configured(keep))
    typer.main.get_command(app).main(list(words), prog_name="chairlift serve", standalone_mode=False)
    if not found:
        raise TyperException("A service has no use for --help.")
    return found[0]


def serve_words(outcome: Outcome, here: Path) -> tuple[str, ...]:
    """Flags that say the same anywhere: those given, what the environment said, and the file.

    Args:
        here: where paths that are not absolute begin.

    Raises:
        ServiceFault: something cannot be written down, or means another thing elsewhere.
    """
    file = outcome.file
    words = ["--config", str(here / file if file is not None else NO_FILE)]
    for name, origin in outcome.origins.items():
        value = getattr(outcome.configuration, name)
        if file is not None and origin.startswith(str(file)):
            if any(not path.is_absolute() for path in _paths(name, value)):
                raise ServiceFault(f"{origin}: {name} must be an absolute path for a service.")
        elif is_secret(name):
            raise _told_aloud(name, origin)
        else:
            words += _spelled(name, value, here)
    return tuple(words)


def secret_files(outcome: Outcome, here: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of those that hold secrets, and of the file of settings; each name once."""
    if outcome.file is not None and outcome.file != NO_FILE:
        yield "config", here / outcome.file
    for name in Configuration.model_fields:
        if name.endswith(("key_file", "keyfile", "certfile")):
            value = getattr(outcome.configuration, name)
            paths = [path for path in (value if isinstance(value, tuple) else (value,)) if path is not None]
            for number, path in enumerate(paths, 1):
                yield name.replace("_", "-") + (f"-{number}" if number > 1 else ""), here / path


def check_private(path: Path) -> None:
    """Raises: ServiceFault: others than its owner can read it, or it is not there."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ServiceFault(f"{path} cannot be read: {error.strerror}.") from None
    if stat.S_ISREG(mode) and mode & PUBLIC:
        raise ServiceFault(f"{path} holds secrets and others can read it: chmod 600 {path}")


def _told_aloud(name: str, origin: str) -> ServiceFault:
    own = f"{flag_of(name)}-file FILE, or " if f"{name}_file" in Configuration.model_fields else ""
    return ServiceFault(
        f"{origin} is a secret, and everybody on this machine can read a service's definition. Put it into a "
        f"file that only you can read (chmod 600) and name that: {own}a file of settings, --config FILE."
    )


def _paths(name: str, value: object) -> Iterator[Path]:
    """Those that a setting names, and that exist or will."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, Path):
            yield each
        elif isinstance(each, ModelTable):
            yield from _paths("model", (each.model, each.chat_template))
        elif isinstance(each, str):
            path = Path(each).expanduser()
            if (name in MODELS and path.exists()) or (name == "responses_store" and store_path(each)):
                yield path


def _spelled(name: str, value: Any, here: Path) -> Iterator[str]:
    if not about(name).flag:
        raise ServiceFault(f"{name} cannot be a flag; put it into a file: --config FILE.")
    flag = flag_of(name)
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
        return
    for each in value if isinstance(value, tuple) else (value,):
        called = ""
        if name == "model":
            called, each = split_name(each)
        path = next(_paths(name, each), None)
        text = (
            called + str(here / path)
            if path is not None
            else called + str(each.value if isinstance(each, Enum) else each)
        )
        if "\n" in text or "\0" in text:
            raise ServiceFault(f"{flag}: a service's definition cannot hold a line break.")
        yield from (flag, text)
