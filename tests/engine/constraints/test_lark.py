"""Which grammars and patterns are refused before they are compiled."""

from __future__ import annotations

import pytest

from chairlift.engine.constraints import regex
from chairlift.engine.constraints.lark import GrammarError, check

FINITE = [
    'start: "a"',
    'start: "a" start | "b"',
    'start: ("a" start)?',
    'start: "a" start* "b"',
    'start: ["a" start]',
    'start: "a" start{0,3}',
    'start: "a" start~0..3',
    'start: x\nx: "a" | x "b"',
    "start: x\nX: /a+/\nx: X",
    'start: %json {"type": "object", "properties": {"a}": {"const": "\\"start: start"}}}',
    'start: <|special|> <[12]> "x"',
    'start: "a" // start\n',
    'start: "a"\n\nloop: "b" loop',
    'start: text "b"\ntext[capture="x", max_tokens=3]: /[^b]*/',
    'start: x\n?x: "a"\n  | "b" x',
    'start: X\nX.2: "a".."z"',
    'start: "a" -> alias',
    '%ignore " "\nstart: "a"',
    'start: "start: start" /start/',
    "not a grammar at all",
    "",
]


@pytest.mark.parametrize("grammar", FINITE)
def test_grammars_that_pass(grammar: str) -> None:
    check(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: start",
        'start: "a" start',
        'start: "a" (start | start "b")',
        'start: ("a" start)+',
        'start: "a" start{1,3}',
        'start: "a" start~2',
        'start: x y\nx: "a"\ny: "b" y',
        'start: x\n?x: "a" x\n  | "b" x',
        '%ignore " "\nstart: "a" start // "b"',
    ],
)
def test_grammars_without_an_end(grammar: str) -> None:
    with pytest.raises(GrammarError, match="has no end"):
        check(grammar)


def test_large_grammars_and_patterns_in_them() -> None:
    with pytest.raises(GrammarError, match="at most"):
        check('start: "' + "a" * 70_000 + '"')
    with pytest.raises(GrammarError, match="nested repeats"):
        check("start: /(a{1000}){1000}/")


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a{1000000}",
        "(ab){1000}",
        "(?:a{10}){10}",
        "[(){}]{100000}",
        r"\({99999}",
        r"\x{41}{99999}",
        "(a|b)*c{5,}",
        "[[a-z]&&[^b]{5}]{70000}",
        "(((",
        ")))",
        "[",
        "\\",
    ],
)
def test_patterns_that_pass(pattern: str) -> None:
    assert regex.complaint(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{1000}){1000}",
        "(ab){40000}",
        "(a{10}){1,9999}",
        "((a{100}){10}){100}",
        "a{999}{999}",
        "(?:a{300}b){300,}",
    ],
)
def test_patterns_that_are_too_large(pattern: str) -> None:
    assert regex.complaint(pattern) is not None
