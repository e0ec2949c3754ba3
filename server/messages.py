"""The messages of a chat request: their images, and what the model's template makes of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.media import ImageInput, MediaProcessor, PreparedMedia
from chairlift.engine.plan import Tokenizer
from chairlift.server.body import check_json
from chairlift.server.errors import APIError, invalid, unsupported
from chairlift.server.media.images import ImageReference
from chairlift.server.wire.chat import ChatRequest, ImagePart, Message, Part, TextPart

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
    """Of a message's text, images aside."""
    content = message.content or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) for part in content if isinstance(part, TextPart))


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
    add_generation_prompt: bool = True,
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
    for name in wire.chat_template_kwargs or ():
        if name in RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{name}"
            raise unsupported(param, f"{param} is reserved.")
    kwargs = (wire.chat_template_kwargs or {}) if variables is None else variables
    offered = list(tools) or None
    messages = [_template_message(message, index, max_depth) for index, message in enumerate(wire.messages)]
    try:
        if processor is None:
            return tokenizer.apply_chat_template(
                messages, tools=offered, add_generation_prompt=add_generation_prompt, **kwargs
            ), None
        tokens, media = processor.prepare(
            messages, images, tools=offered, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return tokens, media if media.digests else None
    except InvalidParameter as error:
        known = error.param.startswith("messages")
        raise invalid(error.message, error.param if known else "messages", "invalid_value") from None
    except Exception:
        # A template is a program that came with the model and runs on what the client sent. What it cannot
        # digest is the request's fault to the client and worth a trace to the operator.
        logger.warning("the chat template failed", exc_info=True)
        raise invalid(
            "The chat template could not render these messages.", "messages", "invalid_value"
        ) from None


def _template_message(message: Message, index: int, max_depth: int) -> dict[str, object]:
    """The message as chat templates expect it: content as text, or as a list of parts where it has images,
    arguments of calls as objects, nothing null.

    OpenAI's `developer` is the same as `system` by another name; templates know the older one.
    """
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, object] = {"role": role, "content": _content(message, f"messages[{index}].content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    if message.function_call is not None:
        call = message.function_call
        rendered["function_call"] = {"name": call.name, "arguments": call.arguments}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, max_depth),
                },
            }
            for call in message.tool_calls
        ]
    return rendered


def _content(message: Message, param: str) -> str | list[dict[str, object]]:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise invalid(f"Missing required parameter: {param}.", param, "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"{param} must hold at least one part.", param, "invalid_value")
    if any(isinstance(part, ImagePart) for part in content):
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": _text(part)}
            for part in content
        ]
    return "\n".join(map(_text, content))


def _text(part: Part) -> str:
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
