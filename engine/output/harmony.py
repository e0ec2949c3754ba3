"""gpt-oss' harmony: every message has a header that names its channel and maybe a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{…}<|call|>

Source: OpenAI's description of the format (openai/harmony, docs/format.md). Read from text: openai-harmony
needs its vocabulary from the network before it parses anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chairlift.engine.output.cursor import Cursor, Grammar, Kind, Marks
from chairlift.engine.output.grammar import Tools
from chairlift.engine.output.json_text import stream_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_BODY_END = Marks([END, CALL, RETURN, START])
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_OPENINGS = (START, CHANNEL, "to=", MESSAGE)


def harmony(cursor: Cursor, tools: Tools | None) -> Grammar[None]:
    """An answer whose prompt ended in `<|start|>assistant`."""
    while True:
        at = yield from cursor.space(0)
        if at == len(cursor.text):
            cursor.skip(at)
            return
        if not (yield from _opens(cursor, at)):
            yield from _body(cursor, cursor.content)  # a model that has left the format
            continue
        length = yield from cursor.find(MESSAGE, at)
        if length < 0:
            cursor.skip(len(cursor.text))
            return
        yield from _message(cursor, cursor.text[:length], length + len(MESSAGE), tools)


def _opens(cursor: Cursor, at: int) -> Grammar[bool]:
    for opening in _OPENINGS:
        if (yield from cursor.matches(opening, at)):
            return True
    return False


def _message(cursor: Cursor, header: str, length: int, tools: Tools | None) -> Grammar[None]:
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if tools is not None and recipient is not None:
        name = recipient[1].removeprefix("functions.")
        if name != recipient[1] or name in tools.names:
            inside = yield from cursor.space(length)
            if (yield from cursor.char(inside)) == "{":
                yield from _call(cursor, name, inside)
                return
            length = 0  # no arguments: content as it stands, header and all
    if channel is not None and channel[1] == "analysis":
        cursor.skip(length, Kind.REASONING)
        yield from _body(cursor, cursor.reasoning, Kind.REASONING)
    elif length:
        cursor.skip(length)
        yield from _body(cursor, cursor.content)
    else:
        cursor.content(len(header) + len(MESSAGE))
        yield from _body(cursor, cursor.content)


def _call(cursor: Cursor, name: str, at: int) -> Grammar[None]:
    cursor.skip(at)
    cursor.start_call(name)
    yield from stream_arguments(cursor, CALL)
    at = yield from cursor.space(0)
    for mark in (CALL, END, RETURN):
        if (yield from cursor.matches(mark, at)):
            cursor.skip(at + len(mark))
            return


def _body(cursor: Cursor, say: Callable[[int], None], kind: Kind = Kind.OTHER) -> Grammar[None]:
    found = yield from cursor.until(_BODY_END, say)
    if found is not None:
        cursor.skip(found.space if found.mark == START else found.length, kind)
