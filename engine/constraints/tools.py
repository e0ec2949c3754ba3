"""Answers that must be tool calls, in whatever form the model writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.constraints.compiler import Compiler
from chairlift.engine.constraints.constraint import Constraint
from chairlift.engine.constraints.pieces import Either, Json, Literal, Piece, Repeat
from chairlift.engine.constraints.pieces import Sequence as Chain


@dataclass(frozen=True, slots=True)
class CallShape:
    """How the model writes a call of one tool: `prefix`, the arguments as JSON under `schema`, `suffix`.

    Texts of special tokens in prefix and suffix stand for those tokens.
    """

    prefix: str
    schema: str
    suffix: str = ""
    strict: bool = False

    @property
    def piece(self) -> Piece:
        arguments = Json(self.schema, self.strict)
        return Chain((Literal(self.prefix), arguments, Literal(self.suffix)))


def tool_call_constraint(
    compiler: Compiler,
    shapes: Sequence[CallShape | Piece],
    param: str,
    *,
    before: Piece | None = None,
    opening: str = "",
    between: str = "",
    closing: str = "",
    parallel: bool = True,
) -> Constraint:
    """An answer of one or more calls and nothing else.

    Args:
        shapes: of the tools that may be called; a `Piece` where arguments are not plain JSON.
        param: what to blame for a schema that cannot be followed.
        before: what comes first, such as the thinking.
        opening, closing: texts around all calls.
        between: text between two calls.
        parallel: more than one call is allowed.

    Raises:
        InvalidParameter: as `Compiler.compile`.
    """
    calls = tuple(shape.piece if isinstance(shape, CallShape) else shape for shape in shapes)
    call = calls[0] if len(calls) == 1 else Either(calls)
    several = Repeat(call, 1, None if parallel else 1, Literal(between) if between else None)
    first = () if before is None else (before,)
    return compiler.compile(Chain((*first, Literal(opening), several, Literal(closing))), param)
