"""A bound on regular expressions, before they are compiled: nested repeats multiply."""

from __future__ import annotations

import re

MOST_PATTERN = 16 * 2**10
"""Characters of a pattern."""
MOST_REPEATED = 2**16
"""Characters that a repeated group may come to: compiling takes a third of a second for 100,000."""
_COUNT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)


def complaint(pattern: str) -> str | None:
    """Why the pattern is too large; None if it is not. Malformed ones pass: they are found when compiled."""
    if len(pattern) > MOST_PATTERN:
        return f"a pattern has {len(pattern)} characters; at most {MOST_PATTERN}"
    size = _largest_repeat(pattern)
    return None if size <= MOST_REPEATED else f"a pattern's nested repeats come to {size} characters"


def _largest_repeat(pattern: str) -> int:
    """Characters of the largest repeated group, written out."""
    sums = [0]  # of the open groups
    atom, grouped = 0, False
    largest = at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "(":
            sums[-1] += atom
            sums.append(0)
            atom, grouped = 0, False
            at += 1
        elif character == ")":
            inner = sums.pop() + atom
            sums = sums or [0]
            atom, grouped = max(inner, 1), True
            at += 1
        elif (match := _COUNT.match(pattern, at)) is not None:
            times = max(int(match[1]), int(match[2] or 0), 1)
            atom *= times
            if grouped:
                largest = max(largest, atom)
            at = match.end()
            grouped = True
        elif character in "*+?":
            at += 1
        else:
            sums[-1] += atom
            atom, grouped = 1, False
            at = _after(pattern, at)
    return largest


def _after(pattern: str, at: int) -> int:
    """Where the atom that begins at `at` ends."""
    if pattern[at] == "\\" and (escape := _ESCAPE.match(pattern, at)) is not None:
        return escape.end()
    if pattern[at] != "[":
        return at + 1
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at
