"""The search for integer offsets and state on modules, and its outcome for the installed versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mlx.offsets import search, uses_in
from tests.mlx.uses import OUTCOMES, lines, section

KEPT = Path(__file__).with_name("uses.txt")


def kinds(body: str) -> list[tuple[str, str]]:
    source = "class Block(nn.Module):\n    def __call__(self, x, cache=None):\n" + body
    return [(use.kind, use.what) for use in sorted(uses_in(source, "mlx_lm", "block"))]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("        x = x[:, : cache.offset]", [("slice", ":cache.offset")]),
        ("        n = cache[0].offset + 1\n        p = mx.arange(0, n)", [("arange", "mx.arange(0, n)")]),
        ("        n = int(cache.offset)", [("int()", "int(cache.offset)")]),
        ("        n = c.offset\n        n = 2 if n > 4 else 1", [("comparison", "n > 4")]),
        ("        if cache.offset:\n            x = x + 1", [("comparison", "cache.offset")]),
        ("        self._seen = x", [("state", "self._seen")]),
        ("        self._seen += x", [("state", "self._seen")]),
    ],
)
def test_uses_are_found(body: str, found: list[tuple[str, str]]) -> None:
    assert kinds(body) == found


@pytest.mark.parametrize(
    "body",
    [
        "        x = self.rope(x, offset=cache.offset)",
        "        n = cache.offset if cache is not None else 0\n        x = self.rope(x, n)",
        "        x = self.norm(x + self.offset)",
        "        seen = x",
    ],
)
def test_rows_of_offsets_and_local_names_are_no_uses(body: str) -> None:
    assert kinds(body) == []


def test_attributes_set_while_building_are_no_state() -> None:
    source = "class Block(nn.Module):\n    def __init__(self):\n        self.width = 3\n"
    assert list(uses_in(source, "mlx_lm", "block")) == []


def test_a_package_that_is_absent_has_none() -> None:
    assert search("no_such_package") == []


def test_the_installed_versions_have_the_uses_that_were_looked_at() -> None:
    """A difference is a new version's new use: look at it, then write the list anew
    (`python -m tests.mlx.uses`)."""
    assert list(lines()) == KEPT.read_text().splitlines()


def test_every_use_has_an_outcome_and_every_outcome_a_use() -> None:
    assert {tuple(line.split("\t")[:2]) for line in lines()} == set(OUTCOMES)
    assert all(f"| {family} |" in section() for _, family in OUTCOMES)
