"""From flags, environment and file to one configuration: a flag goes before the environment, that before the
file, and that before the default."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from chairlift.server.configuration.fields import PREFIX, Configuration, flag_of, is_secret, variable_of
from chairlift.server.security.keys import is_private

FILE_VARIABLE = PREFIX + "CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, PREFIX + "CACHE", PREFIX + "TRACEBACK"})
"""Of Chairlift, but of no setting."""


class ConfigurationError(Exception):
    """Something that was set cannot be so; the message is one sentence that names the place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is in effect, and where it comes from."""

    configuration: Configuration
    origins: Mapping[str, str]
    """By field: the flag, the variable or the file that set it; the others have their defaults."""
    file: Path | None
    """The file that was read."""


def default_file() -> Path:
    """Read where it exists and no other is named."""
    return user_config_path("chairlift", appauthor=False) / "config.toml"


def read(
    flags: Mapping[str, object], file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Outcome:
    """The configuration of the values given by `flags` (by field), `environment`, and `file`, in this order.

    Args:
        file: None: that which the environment names, or the default one, if it exists.

    Raises:
        ConfigurationError: a value cannot be, or a key or variable is unknown.
    """
    path = _file(file, environment)
    tables, text = _read_file(path) if path is not None else ({}, "")
    given = (
        (flags, {name: flag_of(name) for name in flags}),
        (_read_environment(environment), {name: variable_of(name) for name in Configuration.model_fields}),
        (tables, {name: _place(path, text, name) for name in tables}),
    )
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for found, places in given:
        for name, value in found.items():
            if name not in values:
                values[name], origins[name] = value, places[name]
    try:
        return Outcome(Configuration(**values), origins, path)  # type: ignore[arg-type]
    except ValidationError as error:
        raise _explained(error, origins, path, text) from None


def _file(file: Path | None, environment: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if named := environment.get(FILE_VARIABLE):
        return Path(named).expanduser()
    path = default_file()
    return path if os.path.isfile(path) else None  # also where the folder is closed to us


def _read_file(path: Path) -> tuple[dict[str, object], str]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigurationError(f"{path} is not TOML: {error}.") from None
    _check_private(path, tables)
    for key in tables:
        if key not in Configuration.model_fields:
            hint = _nearest(key, Configuration.model_fields)
            raise ConfigurationError(f"{_place(path, text, key)}: there is no setting {key!r}{hint}")
    return tables, text


def _check_private(path: Path, tables: Mapping[str, object]) -> None:
    """Raises: ConfigurationError: the file holds secrets, and others may read it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    secret = next((key for key in tables if tables[key] and is_secret(key)), None)
    if secret is not None and not is_private(path, mode):
        raise ConfigurationError(
            f"{path} holds {secret} and can be read or changed by others (mode {mode:04o}): chmod 600 {path}"
        )


def _place(path: Path | None, text: str, key: str, *within: int | str) -> str:
    """The file and, where it is easily found, the line.

    Args:
        within: a value of several tables: the number of one, and the key there, as far as they are known.
    """
    lines = text.splitlines()
    places = [at for at, line in enumerate(lines) if _begins(line, key)]
    if len(within) > 1 and isinstance(number := within[0], int) and number < len(places):
        begin, *end = places[number : number + 2]
        if lines[begin].lstrip().startswith("[["):
            table = range(begin + 1, *(end or [len(lines)]))
            places = [at for at in table if _begins(lines[at], str(within[1]))] or [begin]
    return f"{path}, line {places[0] + 1}" if places else str(path)


def _begins(line: str, key: str) -> bool:
    """It sets this key, or begins a table of this name."""
    name = re.escape(key)
    match = re.match(rf"""\s*(?:{name}|"{name}"|\[+\s*{name}\s*\]+)\s*[=.#\]]?""", line)
    return match is not None and line[match.end() - 1 : match.end()] in "=.]#"


class _Environment(EnvSettingsSource):
    """Arrays may be separated by commas; anything else that is not plain is JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if str(value).lstrip().startswith(("[", "{")):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ConfigurationError(f"{variable_of(field_name)} is not JSON: {error}.") from None
        parts = [part for each in str(value).split(",") if (part := each.strip())]
        if not parts:  # a key that a template left out must not open the server
            raise ConfigurationError(f"{variable_of(field_name)} is set, and holds nothing.")
        return parts


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    known = {variable_of(name) for name in Configuration.model_fields}
    for name in environment:
        if name.startswith(PREFIX) and name not in known and name not in OTHER_VARIABLES:
            raise ConfigurationError(f"{name}: there is no such setting{_nearest(name, known)}")
    source = _Environment(Configuration)
    source.env_vars = {
        name.lower(): value for name, value in environment.items() if name in known and value != ""
    }
    return source()


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; is {near[0]} meant?" if near else "."


def _explained(
    error: ValidationError, origins: Mapping[str, str], path: Path | None, text: str
) -> ConfigurationError:
    """The first complaint of pydantic, at its place. What was given is not repeated: it may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    origin = origins.get(name, flag_of(name))
    inside = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"][1:])
    if origin.startswith(("--", PREFIX)):
        place = f"{origin}{inside}"
    else:
        place = f"{_place(path, text, name, *first['loc'][1:])}: {name}{inside}"
    return ConfigurationError(f"Invalid value for {place}: {_message(first)}")


def _message(error: ErrorDetails) -> str:
    told = error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        return "There is no such setting."
    if error["type"] == "tuple_type":
        return 'An array is expected, such as ["one", "two"].'
    message = str(told) if isinstance(told, ValueError) else error["msg"]
    return message if message.endswith(".") else message + "."
