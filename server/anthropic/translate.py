"""From a request of Anthropic's form to the chat request that asks for the same: one conversation is checked
and rendered for all surfaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.server.anthropic.context import thinking_to_keep
from chairlift.server.anthropic.conversation import Conversation
from chairlift.server.anthropic.tools import tools_of
from chairlift.server.errors import APIError, invalid
from chairlift.server.wire.messages import ClearToolUses, CountTokensRequest, MessagesRequest

RENAMED: Mapping[str, str] = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
    "chat_template_kwargs.enable_thinking": "thinking",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
    "add_generation_prompt": "messages",
}


@dataclass(slots=True)
class Translation:
    """A chat request, and where each of its places stands in the request it was made of."""

    chat: dict[str, object]
    places: dict[str, str]
    cleared: list[str] = field(default_factory=list)
    """Thinking that `context_management` took out of the conversation, exchange by exchange."""
    results: int = 0
    """Results of tools in the conversation."""
    cleared_results: int = 0

    def relocate(self, error: APIError) -> APIError:
        """The same refusal, with the client's own words for the place."""
        whole = error.param or ""
        known = whole
        while known and known not in self.places:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        if not known:
            return error
        place = self.places[known] + whole[len(known) :]
        message = error.message.replace(whole, place)
        return APIError(
            error.status, message, kind=error.kind, param=place, code=error.code, headers=error.headers
        )


def translate(wire: CountTokensRequest, clear_results: ClearToolUses | None = None) -> Translation:
    """Raises: APIError: 400, for what does not go together."""
    conversation = Conversation()
    conversation.open(wire.system)
    for index, message in enumerate(wire.messages):
        conversation.add(message, f"messages[{index}]")
    conversation.end()
    conversation.clear(thinking_to_keep(wire), clear_results)
    chat: dict[str, object] = {
        "model": wire.model,
        "messages": conversation.messages,
        **_thinking(wire),
    }
    places = {**RENAMED, **conversation.places}
    chat.update(_output(wire, places))
    chat.update(tools_of(wire, places))
    if isinstance(wire, MessagesRequest):
        chat["max_tokens"] = wire.max_tokens
        chat["stop"] = wire.stop_sequences or None
        for name in ("stream", "temperature", "top_k", "top_p"):
            chat[name] = getattr(wire, name)
    given = {name: value for name, value in chat.items() if value is not None}
    return Translation(
        given, places, conversation.cleared_thinking, conversation.results, conversation.cleared_results
    )


def _thinking(wire: CountTokensRequest) -> dict[str, object]:
    """Without the parameter nobody asked for thinking, and clients that do not ask may not expect its blocks:
    the template is told so, whether it can do without or not. `adaptive` is the default of the template."""
    thinking = wire.thinking
    if thinking is None or thinking.type == "disabled":
        asked: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": False}}
    elif thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise invalid(
                "Missing required parameter: thinking.budget_tokens.",
                "thinking.budget_tokens",
                "missing_required_parameter",
            )
        asked = {"enable_thinking": True, "thinking_token_budget": thinking.budget_tokens}
    else:
        asked = {}
    if thinking is not None and thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise invalid(
            f"thinking.budget_tokens is not for thinking of the type {thinking.type}.",
            "thinking.budget_tokens",
            "invalid_value",
        )
    return asked


def _output(wire: CountTokensRequest, places: dict[str, str]) -> dict[str, object]:
    config = wire.output_config
    chosen, place = wire.output_format, "output_format"
    if config is not None and config.format is not None:
        if chosen is not None and chosen != config.format:
            raise invalid(
                "output_format and output_config.format differ; send one of them.",
                "output_format",
                "invalid_value",
            )
        chosen, place = config.format, "output_config.format"
    asked: dict[str, object] = {}
    if chosen is not None:
        places["response_format"] = place
        places["response_format.json_schema.schema"] = f"{place}.schema"
        asked["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": chosen.schema_, "strict": True},
        }
    if config is not None and config.effort is not None:
        asked["reasoning_effort"] = config.effort
    return asked
