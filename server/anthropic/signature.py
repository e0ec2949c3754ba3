"""Signatures of thinking blocks, which clients send back unread.

Anthropic's prove who wrote the block. Ours prove nothing and are not checked: a block is only text to the
model. Where the client asked not to see the thinking, the signature holds it, so that the next turn has it.
"""

from __future__ import annotations

import base64
import hashlib

_SEALED = "sealed."


def signature_of(thinking: str, *, omitted: bool) -> str:
    if omitted:
        return _SEALED + base64.b64encode(thinking.encode()).decode()
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def sealed_thinking(signature: str | None) -> str:
    """The thinking that a signature holds; empty for any other signature."""
    if signature is None or not signature.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SEALED), validate=True).decode()
    except ValueError:  # no base64, or no text
        return ""
