"""A conversation on its way into a chat template. Plain Python values; never changed in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

Message = dict[str, object]
"""`role`, `content` (text, or parts `{"type": "text", "text"}` and `{"type": "image"}`), and, where it has
them, `name`, `reasoning_content`, `tool_calls` (`id`, `type`, `function` of `name` and `arguments`) and
`tool_call_id`."""
Part = dict[str, object]

BETWEEN = "\n\n"
"""Between texts that are joined."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()
    documents: tuple[dict[str, object], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the last message's text, which the model goes on with."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Further ones of the template."""
    suffix: str = ""
    """Stands behind what the template writes."""

    def having(self, messages: list[Message]) -> Conversation:
        return replace(self, messages=tuple(messages))


def calls_of(message: Message) -> list[dict[str, object]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def function_of(call: dict[str, object]) -> dict[str, object]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def results_end(messages: Sequence[Message], at: int) -> int:
    """Where the results of calls that stand from `at` on end."""
    while at < len(messages) and messages[at].get("role") == "tool":
        at += 1
    return at


def places_of(calls: list[dict[str, object]]) -> dict[object, int]:
    """The index of each call that has an id, by its id."""
    return {call["id"]: number for number, call in enumerate(calls) if call.get("id") is not None}


def parts_of(content: object) -> list[Part]:
    """The content as parts; none for an empty text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def text_of(content: object) -> str:
    """Its text, parts joined by line breaks; what is no text is left out."""
    return "\n".join(str(part["text"]) for part in parts_of(content) if part.get("type") == "text")


def joined(first: object, second: object) -> object:
    """Two contents as one: text where both are, parts otherwise."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + BETWEEN + second
    before, after = parts_of(first), parts_of(second)
    if before[-1].get("type") == "text" and after[0].get("type") == "text":
        before = [*before[:-1], {**before[-1], "text": f"{before[-1]['text']}{BETWEEN}"}]
    return [*before, *after]


def has_images(message: Message) -> bool:
    return any(part.get("type") == "image" for part in parts_of(message.get("content")))


def appended(message: Message, text: str) -> Message:
    """The message with `text` right behind its own last text."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": (content if isinstance(content, str) else "") + text}
    parts = list(content)
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and parts[at].get("type") == "text":
            parts[at] = {**parts[at], "text": f"{parts[at]['text']}{text}"}
            return {**message, "content": parts}
    return {**message, "content": [*parts, {"type": "text", "text": text}]}


def tidied(messages: list[Message]) -> list[Message]:
    """What is done for every template, since it takes nothing from any.

    `developer` is `system` by another name; the older `function_call` and role `function` are tool calls
    and their results; and the results of one message's calls stand in the order of the calls and bear the
    name of their function: most templates write no ids, so the order is all that a model sees.
    """
    renamed: list[Message] = []
    last_call: str | None = None
    for index, message in enumerate(messages):
        message = dict(message)
        if message.get("role") == "developer":
            message["role"] = "system"
        call = message.pop("function_call", None)
        if isinstance(call, dict) and not calls_of(message):
            last_call = f"call_{index}"
            message["tool_calls"] = [{"id": last_call, "type": "function", "function": call}]
        if message.get("role") == "function":
            message["role"] = "tool"
            if last_call is not None:
                message.setdefault("tool_call_id", last_call)
        renamed.append(message)
    return _results_in_order(renamed)


def _results_in_order(messages: list[Message]) -> list[Message]:
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        ordered.append(message)
        at += 1
        calls = calls_of(message)
        if not calls:
            continue
        end = results_end(messages, at)
        # Images are known by their order.
        place = {} if any(map(has_images, messages[at:end])) else places_of(calls)
        results = sorted(
            messages[at:end], key=lambda result: place.get(result.get("tool_call_id"), len(calls))
        )
        for result in results:
            number = place.get(result.get("tool_call_id"))
            if number is not None and "name" not in result:
                result = {**result, "name": function_of(calls[number]).get("name")}
            ordered.append(result)
        at = end
    return ordered
