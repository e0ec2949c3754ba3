"""What a request to `/v1/responses` asks for: its conversation, as items and as a chat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.request import SamplingParams
from chairlift.server.body import parse
from chairlift.server.context import Context
from chairlift.server.errors import invalid, shorten
from chairlift.server.payload import Payload
from chairlift.server.responses.caller import Caller
from chairlift.server.responses.conversation import ConversationBuilder
from chairlift.server.responses.items import is_ours, payload, user_message
from chairlift.server.responses.registry import Responses
from chairlift.server.responses.store import ResponseStore
from chairlift.server.responses.translation import Translation, translate
from chairlift.server.wire.parameters import RESPONSES, Surface
from chairlift.server.wire.responses import ITEMS, FunctionTool, Item, ItemReference, ResponsesRequest

SEALED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose references are resolved."""

    wire: ResponsesRequest
    translation: Translation
    conversation: tuple[Payload, ...]
    """Its items, earlier ones included, as they are kept."""
    store: bool
    """It is to be kept."""

    @property
    def logprobs(self) -> bool:
        return bool(self.translation.chat.logprobs)

    @property
    def summarize(self) -> bool:
        reasoning = self.wire.reasoning
        return reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)

    @property
    def seal_reasoning(self) -> bool:
        return SEALED_REASONING in (self.wire.include or ())

    def base(self, id: str, model: str, sampling: SamplingParams) -> Payload:
        """The response before anything is answered. Parameters are given as they are in effect, and the model
        by its own name, not by the alias that was asked for."""
        wire = self.wire
        reasoning = wire.reasoning
        text = wire.text
        form = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else None
        choice = wire.tool_choice
        return {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": bool(wire.background),
            "error": None,
            "incomplete_details": None,
            "instructions": wire.instructions,
            "max_output_tokens": wire.max_output_tokens,
            "max_tool_calls": wire.max_tool_calls,
            "model": model,
            "parallel_tool_calls": wire.parallel_tool_calls is not False,
            "previous_response_id": wire.previous_response_id,
            "prompt_cache_key": wire.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
            },
            "safety_identifier": wire.safety_identifier,
            "service_tier": "default",
            "store": self.store,
            "temperature": sampling.temperature,
            "text": {"format": form or {"type": "text"}, "verbosity": (text and text.verbosity) or "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [_tool(tool) for tool in self.translation.tools],
            "top_logprobs": wire.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": wire.truncation or "disabled",
            "usage": None,
            "user": wire.user,
            "metadata": wire.metadata or {},
        }


def _tool(tool: FunctionTool) -> Payload:
    shown: Payload = {"description": None, "parameters": None, "strict": None}
    return {**shown, **tool.model_dump(by_alias=True, exclude_none=True)}


async def read(raw: bytes, context: Context, caller: Caller, surface: Surface = RESPONSES) -> Asked:
    """Raises: APIError: 400."""
    settings = context.settings
    wire = await asyncio.to_thread(parse, raw, ResponsesRequest, surface, settings.max_json_depth)
    store = context.responses.store
    kept = _check(wire, store)
    earlier = await _earlier(wire, context.responses, caller)
    given: list[Item]
    if isinstance(wire.input, str):
        given = [user_message(wire.input)]
    else:
        given = await _resolve(wire.input or [], store, caller)
    return await asyncio.to_thread(_assemble, wire, earlier, given, kept)


def _assemble(wire: ResponsesRequest, earlier: Sequence[Payload], given: Sequence[Item], kept: bool) -> Asked:
    builder = ConversationBuilder(wire.instructions)
    builder.add(ITEMS.validate_python(list(earlier)), ["previous_response_id"] * len(earlier))
    single = isinstance(wire.input, str)
    builder.add(given, ["input" if single else f"input[{index}]" for index in range(len(given))])
    translation = translate(wire, builder.finish())
    return Asked(wire, translation, (*earlier, *map(payload, given)), kept)


def _check(wire: ResponsesRequest, store: ResponseStore) -> bool:
    """Whether the response is to be kept. Raises: APIError: 400."""
    if wire.stream_options is not None and not wire.stream:
        raise invalid(
            "stream_options is only allowed when stream is true.", "stream_options", "invalid_value"
        )
    if wire.store and not store.enabled:
        raise invalid("store: this server keeps no responses.", "store", "unsupported_value")
    kept = store.enabled and wire.store is not False
    if wire.background and not kept:
        raise invalid(
            "background needs a response that is stored, and this one is not.",
            "background",
            "unsupported_value",
        )
    return kept


async def _earlier(wire: ResponsesRequest, responses: Responses, caller: Caller) -> list[Payload]:
    """The items of the response that this one follows."""
    id = wire.previous_response_id
    if id is None:
        return []
    previous = await responses.find(id, caller, use=True)
    if previous is None:
        raise invalid(
            f"Previous response with id {shorten(id)!r} not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    if previous.owner is not None:
        raise invalid(
            f"previous_response_id: the response {shorten(id)!r} is still in progress.",
            "previous_response_id",
            "invalid_value",
        )
    return [*previous.conversation, *previous.output]


async def _resolve(items: Sequence[Item], store: ResponseStore, caller: Caller) -> list[Item]:
    """Items in place of references to them."""
    wanted = [item.id for item in items if isinstance(item, ItemReference) and is_ours(item.id)]
    found = await store.find_items(wanted, caller) if wanted and store.enabled else {}
    resolved: list[Item] = []
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            resolved.append(item)
        elif item.id in found:
            resolved += ITEMS.validate_python([found[item.id]])
        else:
            where = f"input[{index}].id"
            raise invalid(f"Item with id {shorten(item.id)!r} not found.", where, "item_not_found")
    return resolved
