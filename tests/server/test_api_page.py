"""docs/api.md names every endpoint and every code of an error."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from chairlift.server.openapi.operations import OPERATIONS
from tests.server.parameter_table import PAGE

SERVER = Path(__file__).parents[2] / "server"


def section(start: str) -> str:
    """From there to the next heading."""
    rest = PAGE.read_text(encoding="utf-8").partition(start)[2]
    assert rest, start
    return rest.partition("\n## ")[0]


def codes(path: Path) -> set[str]:
    """Of the refusals that a file makes: what is given as `code`, the third argument of `invalid`."""
    given: list[ast.expr] = []
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call):
            given += [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if isinstance(call.func, ast.Name) and call.func.id == "invalid":
                given += call.args[2:3]
    return {
        value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def test_every_code_of_an_error_is_told() -> None:
    made = {code for path in SERVER.rglob("*.py") for code in codes(path)}
    assert {"queue_full", "model_not_found", "item_not_found"} <= made
    told = set(re.findall(r"`([a-z_]+)`", section("## Errors\n")))
    assert made <= told, made - told


def test_every_endpoint_is_told() -> None:
    told = set(re.findall(r"[`(, ](/[^`\s]*)`", section("| endpoint | |\n")))
    served = {re.sub(r"{\w+}", "{id}", operation.path) for operation in OPERATIONS}
    assert served <= told, served - told
