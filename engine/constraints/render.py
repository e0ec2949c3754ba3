"""From pieces to a grammar in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import regex_to_lark

from chairlift.engine.constraints import lark, regex, schema
from chairlift.engine.constraints.matcher import first_line
from chairlift.engine.constraints.pieces import (
    Either,
    Json,
    Lark,
    Literal,
    Piece,
    Regex,
    Repeat,
    Sequence,
    Token,
    Until,
    Without,
)

WHITE_SPACE = r" |\n {0,64}"
"""Between two tokens of JSON at most one of these, so a model cannot write white space for ever."""
_SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")


def render(piece: Piece, specials: Mapping[str, int]) -> str:
    """The grammar of a whole answer.

    Args:
        specials: the texts of special tokens.

    Raises:
        schema.SchemaError, lark.GrammarError: what is wrong with it, as the end of a sentence.
    """
    return _Renderer(specials).grammar(piece)


class _Renderer:
    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        marks = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._grammars: list[dict[str, str]] = []

    def grammar(self, piece: Piece) -> str:
        start = self._expression(piece)
        main = "\n".join([f"start: {start}", *self._rules]) + "\n"
        if not self._grammars:
            return main
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._grammars]})

    def _expression(self, piece: Piece) -> str:
        match piece:
            case Literal():
                return _quoted(piece.text) if piece.plain else self._literal(piece.text)
            case Token():
                return f"<[{piece.id}]>"
            case Json():
                return self._rule("json", "", f"%json {_json(piece)}")
            case Regex():
                return self._regex(piece.pattern)
            case Lark():
                return self._lark(piece.grammar)
            case Until():
                return self._until(piece.mark)
            case Without():
                pattern = regex_to_lark(piece.pattern, "")
                return self._rule("WITHOUT", "", rf"/(.|\n)*/ & ~/{pattern}/")
            case Sequence():
                return f"({' '.join(map(self._expression, piece.pieces)) or _quoted('')})"
            case Either():
                return f"({' | '.join(map(self._expression, piece.pieces))})"
            case Repeat():
                return self._repeat(piece)

    def _rule(self, kind: str, attributes: str, body: str) -> str:
        """The name of a rule of its own; equal ones share it."""
        key = f"{kind}{attributes}: {body}"
        if key not in self._names:
            name = self._names[key] = f"{kind}_{len(self._names) + 1}"
            self._rules.append(f"{name}{attributes}: {body}")
        return self._names[key]

    def _literal(self, text: str) -> str:
        parts = self._split.split(text) if self._split is not None else [text]
        written = [
            f"<[{self._specials[part]}]>" if part in self._specials else _quoted(part)
            for part in parts
            if part
        ]
        return f"({' '.join(written)})" if written else _quoted("")

    def _regex(self, pattern: str) -> str:
        if (complaint := regex.complaint(pattern)) is not None:
            raise lark.GrammarError(f"cannot be followed: {complaint}")
        return f"/{regex_to_lark(pattern, '')}/" if pattern else _quoted("")

    def _lark(self, grammar: str) -> str:
        grammar = translated(grammar)
        lark.check(grammar)
        name = f"g{len(self._grammars) + 1}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def _until(self, mark: str) -> str:
        if self._split is not None and self._split.match(mark):
            free = self._rule("FREE", "", r"/(.|\n)+/")
            return f"({free}? {self._literal(mark)})"
        escaped = _SPECIAL_CHARACTERS.sub(r"\\\g<0>", mark).replace("\n", r"\n")
        return self._rule("until", "[lazy]", rf"/(.|\n)*{escaped}/")

    def _repeat(self, piece: Repeat) -> str:
        inner = self._expression(piece.piece)
        if piece.between is None:
            return f"({inner}{_times(piece.least, piece.most)})"
        if piece.most == 0:
            return _quoted("")
        more = _times(max(piece.least - 1, 0), None if piece.most is None else piece.most - 1)
        several = f"({inner} ({self._expression(piece.between)} {inner}){more})"
        return several if piece.least else f"({several})?"


def translated(grammar: str) -> str:
    """Lark of a grammar in Lark's or GBNF's syntax.

    Raises:
        lark.GrammarError: it is too large, or neither.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    if len(grammar) > lark.MOST_BYTES:
        raise lark.GrammarError(f"has {len(grammar)} characters; at most {lark.MOST_BYTES}")
    try:
        return str(any_to_lark(grammar))
    except RecursionError:
        raise lark.GrammarError("is nested too deeply") from None
    except Exception as error:  # of its own kind, or whatever its parser stumbled on
        raise lark.GrammarError(f"is neither Lark nor GBNF: {first_line(str(error))}") from None


def _json(piece: Json) -> str:
    content = dict(schema.read(piece.schema))
    content["x-guidance"] = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not piece.compact,
        **({} if piece.compact else {"whitespace_pattern": WHITE_SPACE}),
        "coerce_one_of": not piece.strict,
        "lenient": not piece.strict,
    }
    return json.dumps(content)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
