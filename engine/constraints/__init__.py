"""Answers that must follow a schema, a pattern or a grammar.

1. `pieces`: what the answer is made of, as values: JSON under a schema, a regular expression, literal text,
   special tokens, free text up to a mark, one after the other or one of several.
2. `compiler`: pieces become a `Constraint`: checked, compiled once, immutable. Everything that can be wrong
   with it is found here, before a request is queued, within bounds of time and memory (`schema`, `lark`,
   `regex`, `trial`).
3. `matcher`: follows one row's tokens and says which may come next; masks of many rows at once.

The grammars are llguidance's. Nothing here knows of mlx or HTTP.
"""

from chairlift.engine.constraints.compiler import Compiler, check
from chairlift.engine.constraints.constraint import Constraint
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
)

__all__ = [
    "Compiler",
    "Constraint",
    "Either",
    "Json",
    "Lark",
    "Literal",
    "Piece",
    "Regex",
    "Repeat",
    "Sequence",
    "Token",
    "Until",
    "check",
]
