"""Signatures of thinking blocks, which clients send back unread.

Anthropic's prove who wrote the block. Ours prove nothing and are not checked: a block is only text to the
model. Where the client asked not to see the thinking, the signature holds it, so that the next turn has it.
"""

from __future__ import annotations

import base64
import hashlib

from chairlift.server.sealing import seal, unseal


def signature_of(thinking: str, *, omitted: bool) -> str:
    if omitted:
        return seal(thinking)
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def sealed_thinking(signature: str | None) -> str:
    """The thinking that a signature holds; empty for any other signature."""
    return "" if signature is None else unseal(signature) or ""
