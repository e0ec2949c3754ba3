"""From items to the messages of a chat: one renderer serves both surfaces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.server.errors import invalid, shorten
from chairlift.server.responses.items import reasoning_text
from chairlift.server.wire.responses import (
    Content,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    Refusal,
)

Message = dict[str, object]
"""As `/v1/chat/completions` takes it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the body a message came from, so that what is wrong with it is blamed on the right place."""

    param: str
    content: str | None = None
    """Name of the field that became the message's `content`; None: the place has no inner places."""


@dataclass(slots=True)
class Conversation:
    """Messages, and the place of each."""

    messages: list[Message] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def add(self, message: Message, place: Place) -> None:
        self.messages.append(message)
        self.places.append(place)


@dataclass(slots=True)
class _Answer:
    """An assistant's message that further items may still add to: reasoning, then text, then calls."""

    place: Place
    reasoning: str | None = None
    content: str | None = None
    calls: list[dict[str, object]] = field(default_factory=list)

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ConversationBuilder:
    """Feed it items in order, then `finish`."""

    def __init__(self, instructions: str | None) -> None:
        self._conversation = Conversation()
        self._answer: _Answer | None = None
        self._unanswered: Counter[str] = Counter()
        """Calls by their ids; those that have their output are there with 0."""
        self._places: dict[str, str] = {}
        """Where calls stand, by their ids."""
        self._last: set[str] = set()
        """Ids of the calls since somebody else than the assistant spoke."""
        if instructions is not None:
            self._conversation.add({"role": "system", "content": instructions}, Place("instructions"))

    def finish(self) -> Conversation:
        """Raises: APIError: 400 for a call without an output, unless the conversation ends with it."""
        for id, count in self._unanswered.items():
            if count and id not in self._last:
                raise invalid(
                    f"No tool output found for function call {shorten(id)}.",
                    self._places[id],
                    "invalid_value",
                )
        self._close()
        return self._conversation

    def add(self, items: Sequence[Item], params: Sequence[str]) -> None:
        """`params`: the place of each item in the body.

        Raises:
            APIError: 400 for the output of a call that is not there, or has one.
        """
        for item, param in zip(items, params, strict=True):
            self._add(item, param)

    def _add(self, item: Item, param: str) -> None:
        match item:
            case ReasoningItem():
                if text := reasoning_text(item):
                    self._open(param, new=self._answer is not None).reasoning = text
            case MessageItem(role="assistant"):
                begun = self._answer is not None and (self._answer.content is not None or self._answer.calls)
                self._open(param, new=bool(begun)).content = _plain(item.content, param)
            case MessageItem():
                self._close()
                self._last.clear()
                content = _content(item.content)
                self._conversation.add({"role": item.role, "content": content}, Place(param, "content"))
            case FunctionCallItem():
                if item.status == "incomplete":
                    return  # an answer that broke off in a call: there is nothing to be answered
                self._call(param, item.call_id, item.namespace, item.name, item.arguments)
            case CustomToolCallItem():
                arguments = json.dumps({"input": item.input}, ensure_ascii=False)
                self._call(param, item.call_id, item.namespace, item.name, arguments)
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                self._output(param, item)

    def _call(self, param: str, call_id: str, namespace: str | None, name: str, arguments: str) -> None:
        self._unanswered[call_id] += 1
        self._places[call_id] = param
        self._last.add(call_id)
        full = name if namespace is None else f"{namespace}.{name}"
        function = {"name": full, "arguments": arguments}
        self._open(param, new=False).calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, param: str, item: FunctionCallOutputItem | CustomToolCallOutputItem) -> None:
        if not self._unanswered[item.call_id]:
            where = f"{param}.call_id"
            known = item.call_id in self._unanswered
            raise invalid(
                f"{where} is {item.call_id!r}, and "
                + ("the call of this id has its output." if known else "no call before it has this id."),
                where,
                "invalid_value",
            )
        self._unanswered[item.call_id] -= 1
        self._last.clear()
        self._close()
        message: Message = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        self._conversation.add(message, Place(param, "output"))

    def _open(self, param: str, *, new: bool) -> _Answer:
        if new:
            self._close()
        if self._answer is None:
            self._answer = _Answer(Place(param))
        return self._answer

    def _close(self) -> None:
        if self._answer is not None:
            self._conversation.add(self._answer.message, self._answer.place)
            self._answer = None


def _content(content: Content) -> str | list[dict[str, object]]:
    if isinstance(content, str):
        return content
    return [_part(part) for part in content]


def _part(part: Part) -> dict[str, object]:
    if isinstance(part, InputImage):
        detail = "high" if part.detail == "original" else part.detail or "auto"
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": detail}}
    return {"type": "text", "text": part.refusal if isinstance(part, Refusal) else part.text}


def _plain(content: Content, param: str) -> str:
    """An assistant's text: parts of one answer follow each other without a break."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            where = f"{param}.content[{index}]"
            raise invalid(f"{where} is an image in an assistant's message.", where, "unsupported_value")
        texts.append(part.refusal if isinstance(part, Refusal) else part.text)
    return "".join(texts)
