"""What is refused before a model is loaded for it: all that can be seen without its tokenizer, its template
and its files. Where the model is loaded, the same is found on the way, by the same functions.

Plain functions, fit to run on any thread. Of the context they read the settings and the model's defaults.
"""

from __future__ import annotations

from chairlift.server.anthropic.translate import translate
from chairlift.server.body import fit, parse
from chairlift.server.choices import choices_of
from chairlift.server.context import Context
from chairlift.server.errors import APIError
from chairlift.server.messages import check_messages, image_references
from chairlift.server.reasoning import EFFORT, asked_to_think
from chairlift.server.sampling import with_defaults
from chairlift.server.structured import check_content, content_of
from chairlift.server.tool_history import check_tool_history
from chairlift.server.tools import offer_of
from chairlift.server.validation import chat_sampling, completion_sampling, prompts_of
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.messages import CountTokensRequest
from chairlift.server.wire.parameters import CHAT, COMPLETIONS, Surface


def check_chat_body(raw: bytes, context: Context) -> None:
    """Raises: APIError with 4xx, as the other functions here."""
    wire = parse(raw, ChatRequest, CHAT, context.settings.max_json_depth)
    check_tool_history(wire.messages)
    check_chat_wire(wire, context)


def check_chat_wire(wire: ChatRequest, context: Context) -> None:
    """Of all surfaces that hold a conversation."""
    wire = with_defaults(wire, context.defaults)
    chat_sampling(wire, None)
    choices_of(wire.n)
    content = content_of(wire, wire.ignore_eos)
    offer = offer_of(wire)
    if content is not None and not offer.forced:
        check_content(content)
    asked_to_think(wire)
    check_messages(wire, context.settings.max_json_depth)
    context.images.check(image_references(wire))


def check_completion_body(raw: bytes, context: Context) -> None:
    settings = context.settings
    wire = with_defaults(
        parse(raw, CompletionRequest, COMPLETIONS, settings.max_json_depth), context.defaults
    )
    completion_sampling(wire, None)
    prompts = prompts_of(wire, settings.max_prompts)
    choices_of(wire.n, wire.best_of, prompts=len(prompts), stream=bool(wire.stream))
    content = content_of(wire, wire.ignore_eos)
    if content is not None:
        check_content(content)


def check_messages_body(
    raw: bytes, context: Context, form: type[CountTokensRequest], surface: Surface
) -> None:
    """In Anthropic's form."""
    translation = translate(parse(raw, form, surface, context.settings.max_json_depth))
    # Whether an effort counts is the template's business.
    fields = {name: value for name, value in translation.chat.items() if name != EFFORT}
    try:
        check_chat_wire(fit(fields, ChatRequest, CHAT), context)
    except APIError as error:
        raise translation.relocate(error) from None
