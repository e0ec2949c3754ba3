"""A response's request in the words of a chat, and a chat's errors in the words of a response."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chairlift.server.body import fit
from chairlift.server.errors import APIError, invalid
from chairlift.server.responses.conversation import Conversation
from chairlift.server.wire.base import Generated
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.parameters import CHAT
from chairlift.server.wire.responses import (
    AllowedTools,
    Format,
    FunctionTool,
    JSONObjectFormat,
    JSONSchemaFormat,
    NamedFunction,
    ResponsesRequest,
    TextFormat,
)

SAME = (
    *Generated.model_fields,
    "chat_template_kwargs",
    "enable_thinking",
    "thinking_token_budget",
)
"""Parameters that both have, under one name."""

PLACES = re.compile(
    r"\b(?:messages\[\d+\]|tools\[\d+\]|response_format|max_completion_tokens|reasoning_effort|verbosity"
    r"|tool_choice\.(?:allowed_tools|function))(?:\.\w+|\[\d+\])*"
)
"""Names of places in a chat, as they stand in messages."""
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat, and how to speak of it to whoever sent the response's request."""

    chat: ChatRequest
    conversation: Conversation
    tools: tuple[FunctionTool, ...]
    """The functions that are in the prompt."""
    names: dict[str, str] = field(default_factory=dict)
    """From places in the chat to places in the body."""

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Raises: APIError, whatever it blames blamed by its name in the body."""
        with renaming(self.names, self.conversation):
            yield


@contextmanager
def renaming(names: dict[str, str], conversation: Conversation) -> Iterator[None]:
    try:
        yield
    except APIError as error:
        if error.param is None:
            raise
        param = _rename(error.param, names, conversation)
        message = PLACES.sub(lambda place: _rename(place[0], names, conversation), error.message)
        raise APIError(
            error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers
        ) from None


def translate(wire: ResponsesRequest, conversation: Conversation) -> Translation:
    """Raises: APIError: 400, of a parameter that chats do not take (yet), by its name in the body."""
    if not conversation.messages:
        raise invalid("input must hold at least one item.", "input", "missing_required_parameter")
    names = {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "verbosity": "text.verbosity",
        "logprobs": "include",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice.function": "tool_choice",
    }
    chat: dict[str, object] = {name: getattr(wire, name) for name in SAME}
    chat["messages"] = conversation.messages
    # An assistant's message at the end is an answer of its own here, not the beginning of the next one.
    chat["add_generation_prompt"] = True
    chat["max_completion_tokens"] = wire.max_output_tokens
    chat["parallel_tool_calls"] = wire.parallel_tool_calls
    if wire.structured_outputs is not None:
        chat["structured_outputs"] = wire.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if wire.reasoning is not None:
        chat["reasoning_effort"] = wire.reasoning.effort
    if wire.text is not None:
        chat["verbosity"] = wire.text.verbosity
        chat["response_format"] = _response_format(wire.text.format)
    if LOGPROBS in (wire.include or ()) or wire.top_logprobs:
        chat["logprobs"], chat["top_logprobs"] = True, wire.top_logprobs
    tools = _tools(wire, chat, names)
    with renaming(names, conversation):
        fitted = fit({name: value for name, value in chat.items() if value is not None}, ChatRequest, CHAT)
    return Translation(fitted, conversation, tools, names)


def _tools(
    wire: ResponsesRequest, chat: dict[str, object], names: dict[str, str]
) -> tuple[FunctionTool, ...]:
    """Puts tools and their choice into the chat; the functions among the tools."""
    functions = [
        (index, tool)
        for index, tool in enumerate(wire.tools or ())
        if isinstance(tool, FunctionTool) and _is_callable(tool)
    ]
    known = {tool.name for _, tool in functions}
    choice = wire.tool_choice
    if isinstance(choice, NamedFunction):
        _check_known(choice.name, known, "tool_choice.name")
        chat["tool_choice"] = _named(choice.name)
    elif isinstance(choice, AllowedTools):
        chat["tool_choice"] = _allowed(choice, known)
    elif functions:
        chat["tool_choice"] = choice
    elif choice == "required":
        raise invalid("tool_choice is required, and tools holds no function.", "tool_choice", "invalid_value")
    if functions:
        chat["tools"] = [_chat_tool(tool) for _, tool in functions]
    for position, (index, _) in enumerate(functions):
        names[f"tools[{position}]"] = names[f"tools[{position}].function"] = f"tools[{index}]"
    return tuple(tool for _, tool in functions)


def _is_callable(tool: FunctionTool) -> bool:
    return tool.allowed_callers is None or "direct" in tool.allowed_callers


def _allowed(choice: AllowedTools, known: set[str]) -> object:
    """Tools of other kinds are not there to be called."""
    allowed: list[dict[str, object]] = []
    for index, tool in enumerate(choice.tools):
        if tool.get("type") == "function":
            name = tool.get("name")
            _check_known(name, known, f"tool_choice.tools[{index}].name")
            allowed.append(_named(str(name)))
    if allowed:
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    if choice.mode == "required":
        raise invalid(
            "tool_choice.tools holds no function, and one is required.", "tool_choice.tools", "invalid_value"
        )
    return "none"


def _named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def _check_known(name: object, known: set[str], where: str) -> None:
    if name not in known:
        raise invalid(f"{where} is {name!r}, and tools holds no such function.", where, "invalid_value")


def _chat_tool(tool: FunctionTool) -> dict[str, object]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _response_format(form: Format | None) -> dict[str, object] | None:
    match form:
        case None | TextFormat():
            return None
        case JSONObjectFormat():
            return {"type": "json_object"}
        case JSONSchemaFormat():
            return {
                "type": "json_schema",
                "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True),
            }


def _rename(param: str, names: dict[str, str], conversation: Conversation) -> str:
    """The longest part of `param` that has a name in the body is replaced by it."""
    match = re.match(r"messages\[(\d{1,9})\](\.content\b)?(.*)", param)
    if match and int(match[1]) < len(conversation.places):
        place = conversation.places[int(match[1])]
        if match[2] is None or place.content is None:
            return place.param
        return f"{place.param}.{place.content}{match[3]}"
    for end in sorted({len(param), *(m.start() for m in re.finditer(r"[.\[]", param))}, reverse=True):
        if (name := names.get(param[:end])) is not None:
            return name + param[end:]
    return param
