"""Other ways to say a conversation, for templates that refuse it or leave parts of it out.

Each rewrite is a pure function; one that has nothing to do returns its argument itself. `docs/chat.md` lists
them for users, in this order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from chairlift.engine.chat.conversation import (
    Conversation,
    Message,
    calls_of,
    function_of,
    has_images,
    joined,
    parts_of,
    places_of,
    results_end,
    text_of,
)

SHORT_ID = 9
"""Letters and digits of a call's id where a template insists (Mistral's)."""
_ALPHABET = string.digits + string.ascii_letters
CONVERSATIONAL = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Rewrite:
    name: str
    apply: Callable[[Conversation], Conversation]
    follows: bool = False
    """It may have something to do once others are done."""
    cost: int = 1
    """How far it goes: what costs less is tried first."""


def _each(conversation: Conversation, change: Callable[[Message], Message]) -> Conversation:
    messages = [change(message) for message in conversation.messages]
    if all(new is old for new, old in zip(messages, conversation.messages, strict=True)):
        return conversation
    return conversation.having(messages)


def parts_as_text(conversation: Conversation) -> Conversation:
    """Parts that are all text as one text, joined by line breaks."""

    def change(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return message
        return {**message, "content": text_of(content)}

    return _each(conversation, change)


def names_in_text(conversation: Conversation) -> Conversation:
    """`NAME: ` before the text of a user's or system message that has a name."""

    def change(message: Message) -> Message:
        name = message.get("name")
        if not isinstance(name, str) or message.get("role") not in ("user", "system"):
            return message
        rest = {key: value for key, value in message.items() if key != "name"}
        content = message.get("content")
        if isinstance(content, list):
            return {**rest, "content": [{"type": "text", "text": f"{name}: "}, *content]}
        return {**rest, "content": f"{name}: {content}"}

    return _each(conversation, change)


def arguments_as_text(conversation: Conversation) -> Conversation:
    """A call's arguments as JSON text, not as an object."""

    def change(message: Message) -> Message:
        calls = calls_of(message)
        if not any(isinstance(function_of(call).get("arguments"), dict) for call in calls):
            return message
        return {
            **message,
            "tool_calls": [
                {
                    **call,
                    "function": {**function_of(call), "arguments": _json(function_of(call).get("arguments"))},
                }
                for call in calls
            ],
        }

    return _each(conversation, change)


def short_ids(conversation: Conversation) -> Conversation:
    """Ids of calls as nine letters and digits, the same one where it was the same."""

    def change(message: Message) -> Message:
        changed = message
        if (given := message.get("tool_call_id")) is not None and _short(str(given)) != given:
            changed = {**changed, "tool_call_id": _short(str(given))}
        calls = calls_of(message)
        if any(_short(str(call.get("id"))) != call.get("id") for call in calls):
            changed = {
                **changed,
                "tool_calls": [
                    {**call, "id": _short(str(call.get("id", function_of(call).get("name"))))}
                    for call in calls
                ],
            }
        return changed

    return _each(conversation, change)


def _short(id: str) -> str:
    if len(id) == SHORT_ID and all(character in _ALPHABET for character in id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8])
    digits = ""
    for _ in range(SHORT_ID):
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits


def calls_apart(conversation: Conversation) -> Conversation:
    """One message for a text, and one for each of its calls, followed by its results."""
    given = conversation.messages
    messages: list[Message] = []
    at = 0
    while at < len(given):
        message = given[at]
        at += 1
        calls = calls_of(message)
        if not calls or (len(calls) == 1 and not message.get("content")):
            messages.append(message)
            continue
        end = results_end(given, at)
        if len(calls) > 1 and any(map(has_images, given[at:end])):  # images are known by their order
            messages.append(message)
            continue
        rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        if message.get("content"):
            messages.append({**rest, "content": message["content"]})
        for call, results in zip(calls, _results_of(calls, given[at:end]), strict=True):
            messages += [{**rest, "content": "", "tool_calls": [call]}, *results]
        at = end
    return conversation.having(messages) if len(messages) > len(given) else conversation


def _results_of(calls: list[dict[str, object]], results: tuple[Message, ...]) -> list[list[Message]]:
    """Of each call: those with its id; what has no call's id goes to the first call without a result."""
    place = places_of(calls)
    sorted_out: list[list[Message]] = [[] for _ in calls]
    free = 0
    for result in results:
        at = place.get(result.get("tool_call_id"))
        if at is None:
            while free < len(calls) - 1 and sorted_out[free]:
                free += 1
            at = free
        sorted_out[at].append(result)
    return sorted_out


def null_content(conversation: Conversation) -> Conversation:
    """Null in place of an empty text beside calls."""

    def change(message: Message) -> Message:
        if message.get("content") != "" or not calls_of(message):
            return message
        return {**message, "content": None}

    return _each(conversation, change)


def tools_as_text(conversation: Conversation) -> Conversation:
    """Tools in the system message, calls in the assistant's text, results in the user's, in the Hermes form.

    Source of the form: Nous Research, Hermes Function Calling; Qwen's templates write the same.
    """
    messages: list[Message] = []
    changed = bool(conversation.tools)
    for message in conversation.messages:
        if calls := calls_of(message):
            text = "\n".join(f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            own = message.get("content")
            message["content"] = f"{own}\n{text}" if own and isinstance(own, str) else joined(own, text)
            changed = True
        elif message.get("role") == "tool":
            changed = True
            text = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            images = [part for part in parts_of(message.get("content")) if part.get("type") != "text"]
            before = messages[-1] if messages else {}
            if before.get("from_tool"):
                messages[-1] = {
                    **before,
                    "content": [*parts_of(before["content"]), *parts_of(text), *images]
                    if images or isinstance(before["content"], list)
                    else f"{before['content']}\n{text}",
                }
                continue
            message = {
                "role": "user",
                "content": [*parts_of(text), *images] if images else text,
                "from_tool": True,
            }
        messages.append(message)
    if not changed:
        return conversation
    messages = [{key: value for key, value in message.items() if key != "from_tool"} for message in messages]
    if conversation.tools:
        messages = _with_system(messages, _described(conversation))
    return replace(conversation, messages=tuple(messages), tools=())


def _described(conversation: Conversation) -> str:
    tools = "\n".join(_json(tool) for tool in conversation.tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{tools}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0].get("role") == "system":
        first = messages[0]
        return [{**first, "content": joined(first.get("content"), text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _call(call: dict[str, object]) -> dict[str, object]:
    function = function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what some model once wrote
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def one_system_message(conversation: Conversation) -> Conversation:
    """The system messages at the beginning as one."""
    messages = conversation.messages
    count = _leading_systems(messages)
    if count < 2:
        return conversation
    return conversation.having([reduce(_one, messages[:count]), *messages[count:]])


def later_systems_as_user(conversation: Conversation) -> Conversation:
    """System messages after the beginning as messages of the user, where they stand."""
    return _systems_as_user(conversation, _leading_systems(conversation.messages))


def systems_as_user(conversation: Conversation) -> Conversation:
    """Every system message as one of the user."""
    return _systems_as_user(conversation, 0)


def _systems_as_user(conversation: Conversation, start: int) -> Conversation:
    """From index `start` on: as the beginning of the user's message that follows, or as one of its own."""
    given = conversation.messages
    if not any(message.get("role") == "system" for message in given[start:]):
        return conversation
    messages = list(given[:start])
    said: list[Message] = []
    for message in given[start:]:
        if message.get("role") == "system":
            said.append({**message, "role": "user"})
            continue
        if message.get("role") == "user":
            said.append(message)
        if said:
            messages.append(reduce(_one, said))
            said = []
        if message.get("role") != "user":
            messages.append(message)
    if said:
        messages.append(reduce(_one, said))
    return conversation.having(messages)


def _one(first: Message, second: Message) -> Message:
    """Two neighbours of one role as one message."""
    both = {**first, "content": joined(first.get("content"), second.get("content"))}
    if calls := [*calls_of(first), *calls_of(second)]:
        both["tool_calls"] = calls
    thoughts = [str(said["reasoning_content"]) for said in (first, second) if said.get("reasoning_content")]
    if thoughts:
        both["reasoning_content"] = "\n".join(thoughts)
    return both


def _leading_systems(messages: tuple[Message, ...]) -> int:
    for count, message in enumerate(messages):
        if message.get("role") != "system":
            return count
    return len(messages)


def alternate(conversation: Conversation) -> Conversation:
    """Neighbours of one role, user or assistant, as one message."""
    messages: list[Message] = []
    for message in conversation.messages:
        before = messages[-1] if messages else {}
        if message.get("role") not in CONVERSATIONAL or before.get("role") != message.get("role"):
            messages.append(message)
            continue
        messages[-1] = _one(before, message)
    return conversation if len(messages) == len(conversation.messages) else conversation.having(messages)


def user_first(conversation: Conversation) -> Conversation:
    """An empty message of the user before an assistant's that begins the conversation."""
    count = _leading_systems(conversation.messages)
    rest = conversation.messages[count:]
    if not rest or rest[0].get("role") != "assistant":
        return conversation
    return conversation.having([*conversation.messages[:count], {"role": "user", "content": ""}, *rest])


def content_as_parts(conversation: Conversation) -> Conversation:
    """Text as a list of one part."""

    def change(message: Message) -> Message:
        if not isinstance(message.get("content"), str):
            return message
        return {**message, "content": parts_of(message["content"])}

    return _each(conversation, change)


def text_after_prompt(conversation: Conversation) -> Conversation:
    """A last message to be continued as plain text behind the generation prompt."""
    last = conversation.messages[-1]
    if not conversation.continue_final_message or last.get("role") != "assistant" or calls_of(last):
        return conversation
    return replace(
        conversation,
        messages=conversation.messages[:-1],
        add_generation_prompt=True,
        continue_final_message=False,
        suffix=text_of(last.get("content")),
    )


REWRITES = (
    Rewrite("parts as text", parts_as_text),
    Rewrite("names in the text", names_in_text),
    Rewrite("arguments of calls as text", arguments_as_text),
    Rewrite("short ids of calls", short_ids),
    Rewrite("one call a message", calls_apart),
    Rewrite("null for empty content", null_content, follows=True),
    Rewrite("tools as text", tools_as_text, cost=4),
    Rewrite("one system message", one_system_message),
    Rewrite("later system messages as the user's", later_systems_as_user),
    Rewrite("system messages as the user's", systems_as_user, follows=True, cost=2),
    Rewrite("neighbours of one role joined", alternate, follows=True),
    Rewrite("an empty message of the user first", user_first),
    Rewrite("content as parts", content_as_parts),
    Rewrite("the text to continue behind the prompt", text_after_prompt),
)
"""In the order in which they are applied."""


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
