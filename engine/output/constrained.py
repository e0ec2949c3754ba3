"""A constrained answer in its place: behind the thinking, which is free."""

from __future__ import annotations

from chairlift.engine.constraints.pieces import Literal, Piece, Regex, Repeat, Sequence, Until, optional
from chairlift.engine.output.formats import OutputFormat
from chairlift.engine.output.harmony import CHANNEL, END, MESSAGE, START

_SPACE = Regex(r"[ \t\r\n]{0,8}")
"""What models write behind their thinking; it is no part of the answer."""


def framed(piece: Piece, output: OutputFormat, *, thinks: bool, begins: bool) -> Piece:
    """The whole answer of a model whose content is `piece`.

    Args:
        thinks: its prompt has opened the thinking.
        begins: it may open it itself: nothing of the answer has been said.
    """
    if output.harmony and begins:
        return Sequence((_harmony_thinking(), Literal(f"{CHANNEL}final{MESSAGE}"), piece))
    if output.thinking is None or not (thinks or begins):
        return piece
    thought = Sequence((Until(output.thinking.end), _SPACE))
    if thinks:
        return Sequence((thought, piece))
    return Sequence((optional(Sequence((Literal(output.thinking.start), thought))), piece))


def _harmony_thinking() -> Piece:
    """Messages in other channels, before the final one."""
    message = (Literal(CHANNEL), Regex("analysis|commentary"), Literal(MESSAGE), Until(END))
    return Repeat(Sequence((*message, Literal(f"{START}assistant"))))
