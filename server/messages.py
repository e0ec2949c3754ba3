"""The messages of a chat request: their images, and what the model's template makes of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.media import ImageInput, MediaProcessor, PreparedMedia
from chairlift.engine.plan import Tokenizer
from chairlift.server.body import check_json
from chairlift.server.errors import APIError, invalid, shorten, unsupported
from chairlift.server.media.images import ImageReference
from chairlift.server.wire.chat import (
    ChatRequest,
    FunctionCall,
    ImagePart,
    Message,
    Part,
    RefusalPart,
    TextPart,
    ThinkingPart,
)

logger = logging.getLogger("chairlift.server")

RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of the call that renders a template, which a template's own variables must not replace."""

FIELD_ROLES = MappingProxyType(
    {
        "tool_calls": "assistant",
        "function_call": "assistant",
        "refusal": "assistant",
        "reasoning_content": "assistant",
        "reasoning": "assistant",
        "tool_call_id": "tool",
    }
)
"""Fields of a message that one role alone has. Clients send all of them, those of other roles empty."""


def image_references(wire: ChatRequest) -> list[ImageReference]:
    """The images of all messages, in order."""
    return [
        _reference(part, f"messages[{index}].content[{at}]")
        for index, message in enumerate(wire.messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def characters(message: Message) -> int:
    """Of a message's text, calls and thoughts, images aside."""
    texts = map(_written, _parts(message))
    calls = [call.function for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(message.function_call)
    arguments = [call.arguments for call in calls]
    return sum(map(len, (*texts, *arguments, message.reasoning_content or "", message.reasoning or "")))


def _parts(message: Message) -> list[Part]:
    """The content; a refusal beside it comes last."""
    content = message.content or []
    parts: list[Part] = [TextPart(type="text", text=content)] if isinstance(content, str) else list(content)
    return [*parts, RefusalPart(type="refusal", refusal=message.refusal)] if message.refusal else parts


def _written(part: Part) -> str:
    return part.thinking if isinstance(part, ThinkingPart) else _text(part)


def _reference(part: ImagePart, param: str) -> ImageReference:
    if isinstance(part.image_url, str):
        return ImageReference(part.image_url, "auto", param)
    return ImageReference(part.image_url.url, part.image_url.detail or "auto", param)


def render(
    wire: ChatRequest,
    images: Sequence[ImageInput],
    tokenizer: Tokenizer,
    processor: MediaProcessor | None,
    max_depth: int,
    *,
    tools: Sequence[dict[str, object]] = (),
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], PreparedMedia | None]:
    """Token ids of the prompt, and its images for the model.

    Args:
        processor: of a model that takes images; it renders what has none, too.
        variables: of the template; None: those of the request alone.

    Raises:
        APIError: 400.
    """
    if processor is None and not tokenizer.has_chat_template:
        raise invalid(
            "This model has no chat template; use /v1/completions.", "messages", "unsupported_value"
        )
    _check_reserved(wire)
    _check_variables(wire, tokenizer)
    kwargs = (wire.chat_template_kwargs or {}) if variables is None else variables
    offered = list(tools) or None
    add_generation_prompt, continue_final_message = end_of_prompt(wire)
    messages = [_template_message(message, index, max_depth) for index, message in enumerate(wire.messages)]
    documents: list[dict[str, object]] = [dict(document) for document in wire.documents or []]
    try:
        if processor is None:
            return tokenizer.apply_chat_template(
                messages,
                tools=offered,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            ), None
        tokens, media = processor.prepare(
            messages,
            images,
            tools=offered,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return tokens, media if media.digests else None
    except InvalidParameter as error:
        known = error.param.startswith(("messages", "tools", "documents"))
        raise invalid(error.message, error.param if known else "messages", "invalid_value") from None
    except Exception:
        # A template is a program that came with the model and runs on what the client sent. What it cannot
        # digest is the request's fault to the client and worth a trace to the operator.
        logger.warning("the chat template failed", exc_info=True)
        raise invalid(
            "The chat template could not render these messages.", "messages", "invalid_value"
        ) from None


def check_messages(wire: ChatRequest, max_depth: int) -> None:
    """What `render` would refuse whatever the model. There is a message. Raises: APIError: 400."""
    _check_reserved(wire)
    end_of_prompt(wire)
    for index, message in enumerate(wire.messages):
        _template_message(message, index, max_depth)


def _check_reserved(wire: ChatRequest) -> None:
    """Raises: APIError for a variable that is not the template's."""
    for name in wire.chat_template_kwargs or {}:
        if name in RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{shorten(name)}"
            raise unsupported(param, f"{param} is reserved.")


def _check_variables(wire: ChatRequest, tokenizer: Tokenizer) -> None:
    """Raises: APIError for one that the template does not read."""
    for name, value in (wire.chat_template_kwargs or {}).items():
        # One that is false or null asks for nothing: `enable_thinking` goes to models of all kinds.
        if value in (None, False) or not any(tokenizer.chat_templates):
            continue
        if not tokenizer.template_mentions(name):
            param = f"chat_template_kwargs.{shorten(name)}"
            raise unsupported(param, f"The model's chat template has no variable {shorten(name)}.")


def text_gone_on_with(wire: ChatRequest) -> str | None:
    """The answer's text that stands in the prompt already."""
    if not end_of_prompt(wire)[1]:
        return None
    return "\n".join(map(_written, _parts(wire.messages[-1])))


def end_of_prompt(wire: ChatRequest) -> tuple[bool, bool]:
    """`add_generation_prompt` and `continue_final_message`: an assistant's message at the end is gone on
    with, unless the client says otherwise."""
    last = wire.messages[-1]
    called = bool(last.tool_calls or last.function_call)
    if wire.continue_final_message:
        if wire.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt cannot both be true.",
                "continue_final_message",
                "invalid_value",
            )
        if called:
            raise invalid(
                "The last message ends with tool calls, which cannot be continued.",
                "continue_final_message",
                "invalid_value",
            )
        return False, True
    untold = wire.continue_final_message is None and wire.add_generation_prompt is None
    if last.role == "assistant" and not called and untold:
        return False, True
    return wire.add_generation_prompt is not False, False


def _template_message(message: Message, index: int, max_depth: int) -> dict[str, object]:
    """The message as chat templates expect it: content as text, or as a list of parts where it has images,
    arguments of calls as objects, nothing null.

    OpenAI's `developer` is the same as `system` by another name; templates know the older one.

    Raises:
        APIError: 400 for content that is missing, or a field that is another role's.
    """
    for field, owner in FIELD_ROLES.items():
        if message.role != owner and getattr(message, field):
            param = f"messages[{index}].{field}"
            raise unsupported(param, f"{param}: the {message.role} role has no {field}.")
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, object] = {"role": role, "content": _content(message, f"messages[{index}].content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if role == "assistant" and (thoughts := _thoughts(message)) is not None:
        rendered["reasoning_content"] = thoughts
    if message.function_call is not None:
        rendered["function_call"] = _function(message.function_call, max_depth)
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": _function(call.function, max_depth),
            }
            for call in message.tool_calls
        ]
    return rendered


def _function(call: FunctionCall, max_depth: int) -> dict[str, object]:
    return {"name": call.name, "arguments": _arguments(call.arguments, max_depth)}


def _thoughts(message: Message) -> str | None:
    if message.reasoning_content is not None:
        return message.reasoning_content
    if message.reasoning is not None:
        return message.reasoning
    parts = message.content if isinstance(message.content, list) else []
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    return "\n".join(thoughts) if thoughts else None


def _content(message: Message, param: str) -> str | list[dict[str, object]]:
    content = message.content
    if content is None or content == []:
        # An answer may hold calls or a refusal alone, and a tool may have nothing to say.
        if message.role == "assistant":
            return message.refusal or ""
        if content == [] and message.role == "tool":
            return ""
        if content is None:
            raise invalid(f"Missing required parameter: {param}.", param, "missing_required_parameter")
        raise invalid(f"{param} must hold at least one part.", param, "invalid_value")
    said: list[TextPart | RefusalPart | ImagePart] = []
    for at, part in enumerate(_parts(message)):
        if not isinstance(part, ThinkingPart):
            said.append(part)
        elif message.role != "assistant":
            raise unsupported(f"{param}[{at}]", f"thinking parts are an assistant's; {param}[{at}] is none.")
    if any(isinstance(part, ImagePart) for part in said):
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": _text(part)}
            for part in said
        ]
    return "\n".join(map(_text, said))


def _text(part: TextPart | RefusalPart | ImagePart) -> str:
    if isinstance(part, ImagePart):
        return ""
    return part.text if isinstance(part, TextPart) else part.refusal


def _arguments(text: str, max_depth: int) -> object:
    """Templates write arguments out with their own `tojson`, so they want the object; what some model wrote
    and is no object stays the text that it was."""
    try:
        value = json.loads(text)
        check_json(value, max_depth)
    except (ValueError, RecursionError, APIError):
        return text
    return value if isinstance(value, dict) else text
