"""What a template leaves out, found by rendering a shadow: the same conversation with marks for its texts.

A mark is a word that survives whatever a template does to text (trimming, JSON), so that it is missing in the
rendered shadow only where the template has no place for the text it stands for.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace

from chairlift.engine.chat.conversation import Conversation, Message, Part, calls_of, function_of

SENTINEL = "zqtheendkv"
"""Right behind the text that is to be continued; the prompt is cut there."""
_THOUGHT = "thought"
_WORD = re.compile(rf"zq[0-9a-f]{{6}}kv|{SENTINEL}")


@dataclass(frozen=True, slots=True)
class Mark:
    text: str
    param: str
    """The place it stands for."""


@dataclass(frozen=True, slots=True)
class Shadow:
    conversation: Conversation
    marks: tuple[Mark, ...]

    @property
    def key(self) -> bytes:
        """Equal for conversations that a template treats alike."""
        shadow = self.conversation
        parts = (shadow.messages, shadow.tools, shadow.documents, dict(shadow.variables))
        flags = (shadow.add_generation_prompt, shadow.continue_final_message)
        return hashlib.sha256(json.dumps((*parts, *flags), default=repr).encode()).digest()

    def missing(self, rendered: str, written: Conversation) -> tuple[Mark, ...]:
        """Marks that are not in what the template made of `written`, the shadow or a rewrite of it."""
        if any(message.get("content", "") is None for message in written.messages) and "None" in rendered:
            return self.marks[:1] or (Mark("None", "messages"),)
        found = _found(rendered)
        return tuple(mark for mark in self.marks if mark.text not in found)


def _found(rendered: str) -> set[str]:
    """Marks that stand in the text, and nowhere in a form that no model should see: Python's own notation, a
    part written out whole, or JSON within JSON."""
    found: set[str] = set()
    garbled: set[str] = set()
    for match in _WORD.finditer(rendered):
        word, (start, end) = match[0], match.span()
        found.add(word)
        before, after = rendered[max(0, start - 9) : start], rendered[end : end + 3]
        in_a_part = before.endswith(("'text': '", '"text": "'))
        a_python_key = before.endswith("'") and after == "': "
        json_in_json = before.endswith('\\"') and after.startswith('\\"')
        if in_a_part or a_python_key or json_in_json:
            garbled.add(word)
    return found - garbled


class _Marker:
    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def word(self, param: str) -> str:
        """A new mark; none is a part of another."""
        word = f"zq{len(self.marks):06x}kv"
        self.marks.append(Mark(word, param))
        return word

    def content(self, content: object, param: str) -> object:
        if isinstance(content, str):
            return self._text(content, param)
        if not isinstance(content, list):
            return content
        return [self._part(part, f"{param}[{at}]") for at, part in enumerate(content)]

    def _part(self, part: Part, param: str) -> Part:
        if not isinstance(part, dict) or part.get("type") != "text":
            return part
        return {**part, "text": self._text(str(part.get("text", "")), param)}

    def _text(self, text: str, param: str) -> str:
        if text.endswith(SENTINEL):
            return self._text(text.removesuffix(SENTINEL), param) + SENTINEL
        return self.word(param) if text.strip() else text

    def message(self, message: Message, param: str) -> Message:
        marked = dict(message)
        if "content" in message:
            marked["content"] = self.content(message["content"], f"{param}.content")
        if "reasoning_content" in message:
            marked["reasoning_content"] = _THOUGHT
        if message.get("role") in ("user", "system") and message.get("name"):
            marked["name"] = self.word(f"{param}.name")
        if calls := calls_of(message):
            marked["tool_calls"] = [
                self._call(call, f"{param}.tool_calls[{at}]") for at, call in enumerate(calls)
            ]
        return marked

    def _call(self, call: dict[str, object], param: str) -> dict[str, object]:
        function = function_of(call)
        arguments = function.get("arguments")
        place = f"{param}.function.arguments"
        marked: object = arguments
        if isinstance(arguments, dict):
            marked = {self.word(place): self.word(place)} if arguments else {}
        elif isinstance(arguments, str) and arguments.strip():
            marked = self.word(place)
        name = self.word(f"{param}.function.name")
        return {**call, "function": {**function, "name": name, "arguments": marked}}


def shadow_of(conversation: Conversation) -> Shadow:
    marker = _Marker()
    messages = [
        marker.message(message, f"messages[{at}]") for at, message in enumerate(conversation.messages)
    ]
    tools: tuple[dict[str, object], ...] = tuple(
        {
            "type": "function",
            "function": {
                "name": marker.word("tools"),
                "description": "does",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        for _ in conversation.tools
    )
    documents = tuple(
        {
            key: marker.word("documents") if isinstance(value, str) and value.strip() else value
            for key, value in document.items()
        }
        for document in conversation.documents
    )
    if conversation.continue_final_message:
        marker.marks.append(Mark(SENTINEL, f"messages[{len(messages) - 1}]"))
    shadow = replace(conversation, messages=tuple(messages), tools=tools, documents=documents)
    return Shadow(shadow, tuple(marker.marks))
