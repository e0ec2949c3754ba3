"""From what is asked to the engine's request; under `truncation: auto` older turns give way.

Source: OpenAI's API reference, Responses (`truncation`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from chairlift.server.context import Context
from chairlift.server.errors import APIError
from chairlift.server.responses.conversation import Conversation
from chairlift.server.responses.translation import Translation
from chairlift.server.routes.answer import prepare_conversation
from chairlift.server.validation import Prepared, check_chat

TOO_LONG = "context_length_exceeded"


async def prepare(translation: Translation, request_id: str, context: Context, *, truncate: bool) -> Prepared:
    """Raises: APIError: 400, 404."""
    room = context.engine.info.context_length
    prepared = await _attempt(translation, request_id, context, room if truncate else None)
    if prepared is not None:
        return prepared
    # What is asked for, or an eighth of the context, is left for the answer.
    wanted = translation.chat.max_completion_tokens or room // 8
    room -= min(wanted, room // 2)
    starts = later_starts(translation.conversation)
    low, high = 0, len(starts)
    fitting: Prepared | None = None
    while low < high:
        middle = (low + high) // 2
        attempt = await _attempt(shortened(translation, starts[middle]), request_id, context, room)
        if attempt is None:
            low = middle + 1
        else:
            fitting, high = attempt, middle
    # Where not even the last turn fits, the refusal speaks of the whole conversation.
    return fitting or await _prepare(translation, request_id, context)


async def _attempt(
    translation: Translation, request_id: str, context: Context, room: int | None
) -> Prepared | None:
    """None: it has more than `room` tokens."""
    try:
        prepared = await _prepare(translation, request_id, context)
    except APIError as error:
        if room is None or error.code != TOO_LONG:
            raise
        return None
    longest = max(len(request.prompt_token_ids) for request in prepared.requests)
    return None if room is not None and longest >= room else prepared


async def _prepare(translation: Translation, request_id: str, context: Context) -> Prepared:
    engine = context.engine
    with translation.in_its_words():
        chat = await asyncio.to_thread(
            check_chat,
            translation.chat,
            engine.tokenizer,
            engine.info,
            takes_images=engine.processor is not None,
            defaults=context.defaults,
        )
        return await prepare_conversation(chat, request_id, context)


def later_starts(conversation: Conversation) -> list[int]:
    """Where a shortened conversation may begin, longest first: at a user's turn; behind the last one of
    these at an answer, so that no tool's output is left without its call."""
    roles = [message["role"] for message in conversation.messages]
    first = _leading(roles)
    turns = [index for index in range(first + 1, len(roles)) if roles[index] == "user"]
    last = turns[-1] if turns else first
    return turns + [index for index in range(last + 1, len(roles)) if roles[index] == "assistant"]


def _leading(roles: list[object]) -> int:
    """How many instructions stand at the front; they stay."""
    return next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))


def shortened(translation: Translation, start: int) -> Translation:
    """Without what stands between the leading instructions and message `start`."""
    whole = translation.conversation
    keep = [
        *range(_leading([message["role"] for message in whole.messages])),
        *range(start, len(whole.messages)),
    ]
    messages = translation.chat.messages
    return replace(
        translation,
        chat=translation.chat.model_copy(update={"messages": [messages[index] for index in keep]}),
        conversation=Conversation([whole.messages[i] for i in keep], [whole.places[i] for i in keep]),
    )
