"""A configuration as a TOML file that says the same, with a comment on where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, SecretStr

from chairlift.server.configuration.fields import about, is_secret, names
from chairlift.server.configuration.read import Outcome

DEFAULT = "default"
MASK = "**********"


def written(outcome: Outcome) -> str:
    """What is not set, and what is secret, is a comment."""
    lines = [f"# {'No file was read.' if outcome.file is None else f'Read from {outcome.file}'}"]
    tables: list[str] = []
    group = None
    for name in names():
        value = getattr(outcome.configuration, name)
        origin = outcome.origins.get(name, DEFAULT)
        if _is_tables(value):
            for table in value:
                tables += ["", f"[[{name}]]  # {origin}", *_table(table)]
            continue
        if about(name).group is not group:
            group = about(name).group
            lines += ["", f"# {group}"]
        lines.append(_line(name, value, origin))
    return "\n".join((*lines, *tables)) + "\n"


def _is_tables(value: object) -> bool:
    return isinstance(value, tuple) and any(isinstance(each, BaseModel) for each in value)


def _table(table: BaseModel) -> Iterator[str]:
    for name in type(table).model_fields:
        value = getattr(table, name)
        if value is not None:
            yield f"{name} = {toml(_bare(value))}"


def _line(name: str, value: object, origin: str) -> str:
    if value is None:
        return f"# {name} is not set"
    line = f"{name} = {toml(_bare(value))}"
    return f"{'# ' if value and is_secret(name) else ''}{line}  # {origin}"


def _bare(value: object) -> object:
    """In the types that TOML has."""
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, BaseModel):
        fields = ((name, getattr(value, name)) for name in type(value).model_fields)
        return {name: _bare(each) for name, each in fields if each is not None}
    if isinstance(value, Mapping):
        return {name: _bare(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_bare(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def toml(value: object) -> str:
    """A value in TOML's notation. Raises: TypeError: it has none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's strings are TOML's, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")
