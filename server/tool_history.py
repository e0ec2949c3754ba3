"""Calls and results in a chat's history: each result stands behind its call, and each call gets its result
before the conversation goes on.

Source: what OpenAI's service refuses. It does not read the arguments of calls, so they need be no JSON here
either. Calls without ids, as some clients send them, are told apart by nothing: any result will do.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.server.errors import APIError, invalid, shorten
from chairlift.server.wire.chat import Message


def check_tool_history(messages: Sequence[Message]) -> None:
    """Raises: APIError: 400."""
    waiting: list[str | None] | None = None
    """Ids of the calls without a result; None: no calls may get one."""
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if message.role == "tool":
            _answer(waiting, message, param)
            continue
        if waiting and message.role != "function":
            raise invalid(
                f"{param}: calls need their results first; none stands before it for {_listed(waiting)}.",
                param,
                "invalid_value",
            )
        waiting = None
        if message.tool_calls:
            waiting = [call.id for call in message.tool_calls]
            for at, id in enumerate(waiting):
                if id is not None and id in waiting[:at]:
                    where = f"{param}.tool_calls[{at}].id"
                    raise invalid(f"{where} repeats {shorten(id)!r}.", where, "invalid_value")


def _answer(waiting: list[str | None] | None, message: Message, param: str) -> None:
    """Takes the call that `message` is the result of out of `waiting`."""
    if waiting is None:
        raise invalid(
            f"{param} is a tool's, and has to follow an assistant's message with tool_calls.",
            f"{param}.role",
            "invalid_value",
        )
    id, where = message.tool_call_id or None, f"{param}.tool_call_id"
    if id is None and waiting and None not in waiting:
        raise invalid(f"Missing required parameter: {where}.", where, "missing_required_parameter")
    if id in waiting:
        waiting.remove(id)
    elif None in waiting:
        waiting.remove(None)
    else:
        raise _unknown(id, where)


def _unknown(id: str | None, where: str) -> APIError:
    told = (
        "there are more results than calls"
        if id is None
        else f"{shorten(id)!r} is no call that waits for one"
    )
    return invalid(f"{where}: {told}.", where, "invalid_value")


def _listed(ids: Sequence[str | None]) -> str:
    return shorten(", ".join("a call" if id is None else repr(id) for id in ids))
