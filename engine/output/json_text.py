"""JSON as it comes in: where a value ends, and what a call written as an object says.

Lenient where models are careless and the meaning is plain: line breaks inside strings, arguments as a string
of JSON, closing brackets left out before a call's end mark.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from chairlift.engine.output.cursor import Cursor, Grammar, Marks

NAMES = ("name", "tool_name", "function", "function_name", "tool")
"""Keys of a call's name."""
ARGUMENTS = ("arguments", "parameters", "args")
"""Keys of its arguments."""
MEMBERS = frozenset((*NAMES, *ARGUMENTS, "type", "id"))

_OUTSIDE = re.compile(r"[^\s\w+\-.:,]")
"""Outside strings, the characters that open or close something or cannot stand there."""
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_PAIRS = {"{": "}", "[": "]"}


class ValueScanner:
    """Reads one object or array, from its opening bracket to the closing one, in any number of pieces."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False
        """A character came that no JSON has at that place; it is not part of the value."""

    @property
    def closers(self) -> str:
        """The brackets that are still open, closed."""
        return "".join(reversed(self._closers))

    def scan(self, text: str, at: int = 0) -> tuple[int, str]:
        """(how far the value reaches in `text`, what of it is new, control characters escaped)."""
        parts: list[str] = []
        start = at
        while at < len(text) and not (self.done or self.broken):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                at = len(text)
                break
            at, character = match.start(), match.group()
            if self._in_string and character < " ":
                parts += text[start:at], json.dumps(character)[1:-1]
                start = at + 1
            at += self._step(character)
        parts.append(text[start:at])
        return at, "".join(parts)

    def _step(self, character: str) -> int:
        """1 where the character is part of the value."""
        if self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in _PAIRS:
            self._closers.append(_PAIRS[character])
        elif self._closers and character == self._closers[-1]:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.broken = True
            return 0
        return 1


@dataclass(frozen=True, slots=True)
class CallHead:
    """What an object says of a call, as far as it is read: its arguments begin at `at`, or (where `arguments`
    are given) the object ends there."""

    name: str
    at: int
    arguments: str | None = None


def read_head(cursor: Cursor, at: int, *, strict: bool = False) -> Grammar[CallHead | None]:
    """A call written as a JSON object at this position; None where there is none. Nothing is consumed.

    It comes back as soon as the name is known and an object of arguments begins.

    Args:
        strict: an object with other members than calls have is none.
    """
    if (yield from cursor.char(at)) != "{":
        return None
    members: dict[str, object] = {}
    at += 1
    while True:
        at = yield from cursor.space(at)
        if cursor.text[at : at + 1] == "}":
            return _whole(members, at + 1)
        key = yield from _string(cursor, at)
        if key is None or (strict and key[0] not in MEMBERS):
            return None
        at = yield from cursor.space(key[1])
        if cursor.text[at : at + 1] != ":":
            return None
        at = yield from cursor.space(at + 1)
        if key[0] in ARGUMENTS and (name := _name(members)) and (yield from _opens_object(cursor, at)):
            return CallHead(name, at)
        value = yield from _value(cursor, at)
        if value is None:
            return None
        members[key[0]], at = value
        at = yield from cursor.space(at)
        if cursor.text[at : at + 1] == ",":
            at += 1
        elif cursor.text[at : at + 1] != "}":
            return None


def _whole(members: dict[str, object], at: int) -> CallHead | None:
    """From an object that is read to its end."""
    for key in ("function", "tool"):
        inner = members.get(key)
        if isinstance(inner, dict):
            members = inner
    name = _name(members)
    if name is None:
        return None
    given = next((members[key] for key in ARGUMENTS if key in members), None)
    if isinstance(given, str):
        try:
            given = json.loads(given, strict=False) if given.strip() else {}
        except (ValueError, RecursionError):
            return None
    if given is None:
        given = {}
    arguments = object_text(given)
    return None if arguments is None else CallHead(name, at, arguments)


def object_text(value: object) -> str | None:
    """An object as JSON; None for what is none, or holds what JSON has not."""
    if not isinstance(value, dict):
        return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _name(members: dict[str, object]) -> str | None:
    for key in NAMES:
        name = members.get(key)
        if isinstance(name, str) and name:
            return name
    return None


def _opens_object(cursor: Cursor, at: int) -> Grammar[bool]:
    """An object in double quotes, or an empty one: what may be passed on as it comes."""
    if (yield from cursor.char(at)) != "{":
        return False
    inside = yield from cursor.space(at + 1)
    return cursor.text[inside : inside + 1] in ('"', "}")


def _string(cursor: Cursor, at: int) -> Grammar[tuple[str, int] | None]:
    """A string and the position behind it."""
    value = yield from _value(cursor, at)
    return value if value is not None and isinstance(value[0], str) else None  # type: ignore[return-value]


def _value(cursor: Cursor, at: int) -> Grammar[tuple[object, int] | None]:
    """Any value and the position behind it."""
    first = yield from cursor.char(at)
    if first == '"':
        end = yield from _string_end(cursor, at)
    elif first in _PAIRS:
        end = yield from _bracket_end(cursor, at)
    else:
        end = yield from _scalar_end(cursor, at)
    if end < 0:
        return None
    try:
        return json.loads(cursor.text[at:end], strict=False), end
    except (ValueError, RecursionError):
        return None


def _string_end(cursor: Cursor, at: int) -> Grammar[int]:
    at += 1
    while True:
        match = _STRING.search(cursor.text, at)
        if match is None:
            at = max(at, len(cursor.text))
            if not (yield from cursor.more()):
                return -1
        elif match.group() == '"':
            return match.end()
        else:
            at = match.end() + 1


def _bracket_end(cursor: Cursor, at: int) -> Grammar[int]:
    scanner = ValueScanner()
    while True:
        at, _ = scanner.scan(cursor.text, at)
        if scanner.done:
            return at
        if scanner.broken or not (yield from cursor.more()):
            return -1


def _scalar_end(cursor: Cursor, at: int) -> Grammar[int]:
    while True:
        match = _SCALAR_END.search(cursor.text, at)
        if match is not None:
            return match.start()
        if len(cursor.text) - at > 400 or not (yield from cursor.more()):
            return -1


def stream_arguments(cursor: Cursor, end: str) -> Grammar[bool]:
    """Pass the object at the front on as it comes, then end the call. False where the call broke off.

    Args:
        end: the mark that ends a call, if the format has one. Brackets left open before it are closed.
    """
    scanner = ValueScanner()
    while True:
        reach, text = scanner.scan(cursor.text)
        cursor.arguments(text)
        cursor.skip(reach)
        if scanner.done:
            break
        if scanner.broken:
            if end and (yield from cursor.matches(end, 0)):
                cursor.arguments(scanner.closers)
                break
            return (yield from _broken(cursor, end))
        if not (yield from cursor.more()):
            return False
    cursor.end_call()
    return True


def _broken(cursor: Cursor, end: str) -> Grammar[bool]:
    """The rest of a call that is no JSON any more: what the model wrote, as it wrote it."""
    marks = Marks([end])
    while True:
        found = cursor.text.find(end) if end else -1
        if found >= 0:
            cursor.arguments(cursor.text[:found])
            cursor.skip(found)
            return False
        safe = len(cursor.text) - (0 if cursor.final else marks.held(cursor.text))
        cursor.arguments(cursor.text[:safe])
        cursor.skip(safe)
        if not (yield from cursor.more()):
            return False
