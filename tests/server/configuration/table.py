"""docs/configuration.md's tables of settings, made from the code.

`python -m tests.server.configuration.table` writes them into the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, StrEnum
from pathlib import Path

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from chairlift.server.configuration.about import Group
from chairlift.server.configuration.fields import Configuration, about, flag_of, variable_of
from chairlift.server.configuration.flags import plain
from chairlift.server.configuration.models import Defaults, ModelTable

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
BEGIN = "## Every setting\n"


def tables() -> str:
    lines = [BEGIN]
    for group in Group:
        names = [name for name in Configuration.model_fields if about(name).group is group]
        lines += [f"### {group}\n", "| flag | variable | value | default | |", "|---|---|---|---|---|"]
        lines += [*(_row(name) for name in names), ""]
    lines += ["## A table `[[models]]`\n", "| key | value | |", "|---|---|---|"]
    for name, field in ModelTable.model_fields.items():
        told = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_kind(field)} | {told} |")
    lines += ["", "What is left out is as the setting of the same name says. `defaults` may hold:"]
    lines.append(", ".join(f"`{name}`" for name in Defaults.model_fields) + ".")
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(name: str) -> str:
    flag = f"`{flag_of(name)}`" if about(name).flag else f"only `{name}`"
    cells = (flag, f"`{variable_of(name)}`", _value(name), _default(name), about(name).help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(name: str) -> str:
    default = Configuration.model_fields[name].get_default(call_default_factory=True)
    if default is None or default == ():
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default.value if isinstance(default, Enum) else default}`"


KINDS = {int: "number", float: "number", str: "text", bool: "true or false", Path: "path"}


def _value(name: str) -> str:
    return about(name).metavar or _kind(Configuration.model_fields[name])


def _kind(field: FieldInfo) -> str:
    annotation, metadata = plain(field.annotation)
    if annotation in KINDS:
        bounds = list(_bounds([*field.metadata, *metadata]))
        return ", ".join([KINDS[annotation], *bounds])
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{each.value}`" for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    (kind,) = annotation.__args__
    return "tables" if issubclass(kind, BaseModel) else f"{KINDS[kind]}, several"


def _bounds(metadata: list[object]) -> Iterator[str]:
    for each in metadata:
        if isinstance(each, annotated_types.Ge):
            yield f"at least {each.ge}"
        elif isinstance(each, annotated_types.Le):
            yield f"at most {each.le}"


def written(page: str) -> str:
    """The page with these tables in place of those it has; they are its end."""
    before, heading, _ = page.partition(BEGIN)
    assert heading, "the page has no such heading"
    return before + tables()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
