"""What is checked of a grammar in Lark's syntax before it is compiled: its size, and that it has an end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from chairlift.engine.constraints import regex
from chairlift.engine.constraints.horn import Clause, derivable

MOST_BYTES = 64 * 2**10
_HEAD = re.compile(r"^[ \t]*[?!]*([A-Za-z_]\w*)[ \t]*(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.M)
_LEXEME = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?(?:\s*\.\.\s*"(?:\\.|[^"\\\n])*")?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<inline>%\w+)
    |(?P<token><[^>\s]*>|@\w+|\$?"[^"]*")
    |(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})
    |(?P<repeat>[*+?])
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>[()|\[\]&~])
    """,
    re.VERBOSE,
)


class GrammarError(ValueError):
    """The message says what is wrong, as the end of a sentence that names the parameter."""


def check(grammar: str) -> None:
    """Refuse grammars that are too large, or from whose `start` no finite text can be made.

    What is not understood here passes: llguidance has the last word.

    Raises:
        GrammarError: see above.
    """
    size = len(grammar.encode())
    if size > MOST_BYTES:
        raise GrammarError(f"has {size} bytes; at most {MOST_BYTES}")
    rules = _rules(grammar)
    clauses: list[Clause] = []
    for name, body in rules:
        try:
            lexemes = list(_lexemes(body))
        except _Unknown:
            clauses.append((name, ()))
            continue
        for kind, text in lexemes:
            if kind == "regex" and (complaint := regex.complaint(text)) is not None:
                raise GrammarError(f"cannot be followed: {complaint}")
        clauses += _Clauses(name, lexemes, {rule for rule, _ in rules}).clauses
    if any(name == "start" for name, _ in rules) and "start" not in derivable(clauses):
        raise GrammarError("has no end: no finite text can be made from its rule start")


class _Unknown(Exception):
    pass


def _rules(grammar: str) -> list[tuple[str, str]]:
    """(name, right-hand side) of every rule and terminal."""
    heads = list(_HEAD.finditer(grammar))
    ends = [*(head.start() for head in heads[1:]), len(grammar)]
    return [(head[1], grammar[head.end() : end]) for head, end in zip(heads, ends, strict=False)]


def _lexemes(body: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(body):
        match = _LEXEME.match(body, at)
        if match is None:
            raise _Unknown
        kind = match.lastgroup or ""
        if kind == "inline" and match[0] in ("%json", "%regex", "%lark"):
            at = _braces(body, match.end())
            yield "text", ""
            continue
        if kind == "inline":  # %ignore and the like: statements of their own
            return
        at = match.end()
        if kind != "skip":
            yield kind, match[0]


def _braces(body: str, at: int) -> int:
    """Where the braces that follow are closed."""
    start = body.find("{", at)
    depth, quoted = 0, False
    position = start
    while 0 <= position < len(body):
        character = body[position]
        if quoted and character == "\\":
            position += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return position + 1
        position += 1
    raise _Unknown


class _Clauses:
    """When the alternatives of one rule have an end. Nodes of groups are made up."""

    def __init__(self, name: str, lexemes: list[tuple[str, str]], rules: set[str]) -> None:
        self.clauses: list[Clause] = []
        self._rule = name
        self._rules = rules
        self._groups = 0
        open_groups: list[tuple[object, str]] = [(name, "")]
        needed: list[list[object]] = [[]]
        for kind, text in lexemes:
            if text in ("(", "["):
                self._groups += 1
                open_groups.append(((name, self._groups), text))
                needed.append([])
            elif text in (")", "]") and len(open_groups) > 1:
                group, opened = open_groups.pop()
                self.clauses.append((group, needed.pop()))
                if opened == "(":
                    needed[-1].append(group)
            elif text == "|":
                self.clauses.append((open_groups[-1][0], needed[-1]))
                needed[-1] = []
            elif text in ("*", "?") or (kind == "count" and re.match(r"[~{]\s*(?:0|,)", text)):
                if needed[-1]:
                    needed[-1].pop()
            elif kind == "name" and text in self._rules:
                needed[-1].append(text)
            elif kind in ("name", "text", "regex", "token"):
                needed[-1].append("")
        for (group, _), parts in zip(open_groups, needed, strict=True):
            self.clauses.append((group, parts))
        self.clauses.append(("", ()))
