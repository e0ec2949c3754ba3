"""What a constrained answer is made of, as values that say nothing of how they are enforced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text. Texts of special tokens in it stand for those tokens, unless it is plain."""

    text: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Exactly this token."""

    id: int


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value under a schema.

    Attributes:
        schema: JSON Schema, as JSON. `{}` is any value.
        strict: refuse a schema with a keyword that cannot be enforced; else such keywords have no effect.
        compact: no white space between its tokens. Else little: a space, or a line break and its indentation.
    """

    schema: str
    strict: bool = False
    compact: bool = False


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches the whole pattern, in the syntax of Rust's `regex`: no look-around, no
    back-references."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Text by a grammar with a rule `start`: Lark as llguidance has it, or GBNF, which is translated."""

    grammar: str


@dataclass(frozen=True, slots=True)
class Until:
    """Free text up to the first `mark`, and the mark. A mark that begins with a special token's text begins
    with that token. Special tokens are no part of free text."""

    mark: str


@dataclass(frozen=True, slots=True)
class Without:
    """Free text that does not match the pattern as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of them."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times, None for no bound; `between` stands between two of them."""

    piece: Piece
    least: int = 0
    most: int | None = None
    between: Piece | None = None


Piece = Literal | Token | Json | Regex | Lark | Until | Without | Sequence | Either | Repeat


def optional(piece: Piece) -> Repeat:
    return Repeat(piece, 0, 1)


def either(pieces: Iterable[Piece]) -> Piece:
    """One of them; the piece itself where there is but one."""
    listed = tuple(pieces)
    return listed[0] if len(listed) == 1 else Either(listed)
