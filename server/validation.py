"""From a body to the engine's requests, once: nothing downstream checks again.

`prepare_chat` and `prepare_completions` are plain functions of a body, fit to run on any thread.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.plan import ModelInfo, Tokenizer
from chairlift.engine.request import Request, SamplingParams
from chairlift.server.body import check_json, parse
from chairlift.server.errors import APIError, invalid, model_not_found, unsupported
from chairlift.server.settings import ServerSettings
from chairlift.server.wire.base import Sampled
from chairlift.server.wire.chat import ChatRequest, Message, TextPart
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.parameters import CHAT, COMPLETIONS

logger = logging.getLogger("chairlift.server")

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default on /v1/completions; a chat answer runs to the end of the context."""

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one body asks for: a choice for every request, in order."""

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    echoes: tuple[str, ...] = ()
    """What each choice's text begins with; empty unless `echo`."""


def prepare_chat(
    raw: bytes, request_id: str, tokenizer: Tokenizer, info: ModelInfo, settings: ServerSettings
) -> Prepared:
    """Raises: APIError with 4xx."""
    wire = parse(raw, ChatRequest, CHAT, settings.max_json_depth)
    _check_common(wire, info)
    if not wire.messages:
        raise invalid("messages must hold at least one message.", "messages", "invalid_value")
    if wire.top_logprobs is not None and not wire.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true.", "top_logprobs", "invalid_value")
    spelled = "max_tokens"
    if wire.max_completion_tokens is not None:
        if wire.max_tokens not in (None, wire.max_completion_tokens):
            raise invalid(
                "max_tokens and max_completion_tokens differ; send one of them.",
                "max_tokens",
                "invalid_value",
            )
        spelled = "max_completion_tokens"
    max_tokens = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    sampling = _sampling(
        wire,
        tokenizer,
        max_tokens=max_tokens,
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        spelled={"max_tokens": spelled, "logprobs": "top_logprobs"},
    )
    prompt = _render(wire, tokenizer, settings.max_json_depth)
    if not prompt:
        raise invalid("The chat template made an empty prompt of messages.", "messages", "invalid_value")
    return Prepared((Request(request_id, tuple(prompt), sampling),), bool(wire.stream), _include_usage(wire))


def prepare_completions(
    raw: bytes, request_id: str, tokenizer: Tokenizer, info: ModelInfo, settings: ServerSettings
) -> Prepared:
    """Raises: APIError with 4xx."""
    wire = parse(raw, CompletionRequest, COMPLETIONS, settings.max_json_depth)
    _check_common(wire, info)
    if wire.echo and wire.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported.")
    sampling = _sampling(
        wire,
        tokenizer,
        max_tokens=COMPLETION_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens,
        logprobs=wire.logprobs,
        spelled={},
    )
    prompts = _prompts(wire, tokenizer, settings.max_prompts)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    return Prepared(
        tuple(Request(name, tokens, sampling) for name, (tokens, _) in zip(ids, prompts, strict=True)),
        bool(wire.stream),
        _include_usage(wire),
        tuple(tokenizer.decode(list(tokens)) if text is None else text for tokens, text in prompts)
        if wire.echo
        else (),
    )


def _check_common(wire: Sampled, info: ModelInfo) -> None:
    if wire.model != info.name:
        raise model_not_found(wire.model)
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise invalid(
            "stream_options is only allowed when stream is true.", "stream_options", "invalid_value"
        )
    if options is not None and options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats")


def _include_usage(wire: Sampled) -> bool:
    return bool(wire.stream_options and wire.stream_options.include_usage)


def _sampling(
    wire: Sampled,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    spelled: dict[str, str],
) -> SamplingParams:
    """`spelled`: the client's name of a parameter, where the engine has another."""
    default = SamplingParams()
    stop = () if wire.stop is None else wire.stop
    stop_token_ids = tuple(wire.stop_token_ids or ())
    _check_vocabulary(stop_token_ids, tokenizer, "stop_token_ids")
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=default.temperature if wire.temperature is None else wire.temperature,
            top_p=default.top_p if wire.top_p is None else wire.top_p,
            top_k=default.top_k if wire.top_k is None else wire.top_k,
            min_p=default.min_p if wire.min_p is None else wire.min_p,
            seed=wire.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(wire.ignore_eos),
            logprobs=logprobs,
        )
    except InvalidParameter as error:
        name = spelled.get(error.param, error.param)
        raise invalid(error.message.replace(error.param, name, 1), name, "invalid_value") from None


def _check_vocabulary(token_ids: tuple[int, ...], tokenizer: Tokenizer, param: str) -> None:
    size = tokenizer.vocab_size
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
        at, token = next((at, token) for at, token in enumerate(token_ids) if not 0 <= token < size)
        raise invalid(
            f"{param}[{at}] is {token}, which is not a token of this model (0 to {size - 1}).",
            f"{param}[{at}]",
            "invalid_value",
        )


def _prompts(
    wire: CompletionRequest, tokenizer: Tokenizer, most: int
) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens of each prompt, and its text where the client sent text."""
    given = wire.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts: list[object] = list(given) if several else [given]
    if len(prompts) > most:
        raise invalid(f"prompt holds {len(prompts)} prompts; at most {most}.", "prompt", "invalid_value")
    result: list[tuple[tuple[int, ...], str | None]] = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if several else "prompt"
        if not prompt:
            raise invalid(f"{param} is empty: it must hold at least one token.", param, "invalid_value")
        if isinstance(prompt, str):
            tokens = tuple(tokenizer.encode(prompt))
            if not tokens:
                raise invalid(f"{param} makes no token.", param, "invalid_value")
            result.append((tokens, prompt))
        else:
            assert isinstance(prompt, list)
            tokens = tuple(prompt)
            _check_vocabulary(tokens, tokenizer, param)
            result.append((tokens, None))
    return result


def _render(wire: ChatRequest, tokenizer: Tokenizer, max_depth: int) -> list[int]:
    if not tokenizer.has_chat_template:
        raise invalid(
            "This model has no chat template; use /v1/completions.", "messages", "unsupported_value"
        )
    kwargs = wire.chat_template_kwargs or {}
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{name}"
            raise unsupported(param, f"{param} is reserved.")
    messages = [_template_message(message, index, max_depth) for index, message in enumerate(wire.messages)]
    try:
        return tokenizer.apply_chat_template(messages, tools=None, add_generation_prompt=True, **kwargs)
    except InvalidParameter as error:
        raise invalid(error.message, "messages", "invalid_value") from None
    except Exception:
        # A template is a program that came with the model and runs on what the client sent. What it cannot
        # digest is the request's fault to the client and worth a trace to the operator.
        logger.warning("the chat template failed", exc_info=True)
        raise invalid(
            "The chat template could not render these messages.", "messages", "invalid_value"
        ) from None


def _template_message(message: Message, index: int, max_depth: int) -> dict[str, object]:
    """The message as chat templates expect it: text content, arguments of calls as objects, nothing null.

    OpenAI's `developer` is the same as `system` by another name; templates know the older one.
    """
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, object] = {"role": role, "content": _text(message, f"messages[{index}].content")}
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


def _text(message: Message, param: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise invalid(f"Missing required parameter: {param}.", param, "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"{param} must hold at least one part.", param, "invalid_value")
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _arguments(text: str, max_depth: int) -> object:
    """Templates write arguments out with their own `tojson`, so they want the object; what some model wrote
    and is no object stays the text that it was."""
    try:
        value = json.loads(text)
        check_json(value, max_depth)
    except (ValueError, RecursionError, APIError):
        return text
    return value if isinstance(value, dict) else text
