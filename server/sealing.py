"""Reasoning as a string that clients hand back unread: base64 behind a mark.

It is the text itself: whoever holds an answer has its reasoning anyway, and there is nobody else to hide it
from.
"""

from __future__ import annotations

import base64

SEALED = "chairlift1."
"""How it begins, so that what another server made is told from it."""


def seal(text: str) -> str:
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """None for what another server made."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except ValueError:  # no base64, or no text
        return None
