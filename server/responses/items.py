"""Items as they are kept and listed: each with an id and a status, texts as lists of parts.

Source: OpenAI's API reference, Responses (List input items).
"""

from __future__ import annotations

import re
import uuid

from chairlift.server.payload import Payload
from chairlift.server.sealing import unseal
from chairlift.server.wire.base import Wire
from chairlift.server.wire.responses import (
    Content,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemReference,
    MessageItem,
    Part,
    ReasoningItem,
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def is_ours(id: str) -> bool:
    """Made by `new_id`, so that nobody else's item has it: clients give ids to items, too."""
    return re.fullmatch(r"[a-z]+_[0-9a-f]{32}", id) is not None


def reasoning_text(item: ReasoningItem) -> str:
    """All that can be read of the reasoning: its text, else what was sealed, else its summary."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None and (text := unseal(item.encrypted_content)) is not None:
        return text
    return "\n".join(part.text for part in item.summary or ())


def user_message(text: str) -> MessageItem:
    """What an input that is a string stands for."""
    return MessageItem(type="message", role="user", content=text)


def payload(item: Item) -> Payload:
    """Whole, as it is listed; an id is given to what has none. Not for references."""
    match item:
        case MessageItem():
            return _finish(item, "msg", content=_parts(item.content, outgoing=item.role == "assistant"))
        case FunctionCallItem():
            return _finish(item, "fc")
        case CustomToolCallItem():
            return _finish(item, "ctc")
        case FunctionCallOutputItem():
            return _finish(item, "fco", output=_output(item.output))
        case CustomToolCallOutputItem():
            return _finish(item, "ctco", output=_output(item.output))
        case ReasoningItem():
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            return _finish(item, "rs", content=content, summary=summary)
        case ItemReference():
            raise ValueError("A reference is no item.")


def _finish(item: Wire, prefix: str, **more: object) -> Payload:
    shown: Payload = item.model_dump(by_alias=True, exclude_none=True)
    shown |= more
    kind = shown.pop("type", "message")
    return {"id": shown.pop("id", None) or new_id(prefix), "type": kind, "status": "completed"} | shown


def _output(output: Content) -> str | list[Payload]:
    return output if isinstance(output, str) else _parts(output, outgoing=False)


def _parts(content: Content, *, outgoing: bool) -> list[Payload]:
    if isinstance(content, str):
        part: Payload = {"type": "output_text" if outgoing else "input_text", "text": content}
        return [{**part, "annotations": []} if outgoing else part]
    return [_part(part) for part in content]


def _part(part: Part) -> Payload:
    shown: Payload = part.model_dump(exclude_none=True)
    if shown["type"] == "output_text":
        shown.setdefault("annotations", [])
    elif shown["type"] == "input_image":
        shown.setdefault("detail", "auto")
    return shown
