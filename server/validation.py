"""From a body to the engine's requests, once: nothing downstream checks again.

`parse_chat`, `prepare_chat` and `prepare_completions` are plain functions, fit to run on any thread. Between
the first two a chat's images are read, which waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from chairlift.engine.constraints import Compiler
from chairlift.engine.media import ImageInput, MediaProcessor
from chairlift.engine.output.events import OutputParser
from chairlift.engine.output.formats import TAIL, OutputFormat
from chairlift.engine.output.plain import PlainParser
from chairlift.engine.plan import ModelInfo, Tokenizer
from chairlift.engine.request import Request, SamplingParams
from chairlift.server.body import parse
from chairlift.server.choices import Choices, choices_of
from chairlift.server.encoders import Echo
from chairlift.server.errors import invalid, unsupported
from chairlift.server.media.images import ImageReference
from chairlift.server.messages import characters, image_references, render, text_gone_on_with
from chairlift.server.reasoning import template_variables, thinking_budget
from chairlift.server.sampling import check_vocabulary, sampling_params, with_defaults
from chairlift.server.settings import ServerSettings
from chairlift.server.structured import Asked, answer_constraint, constraint_of, content_of
from chairlift.server.tool_history import check_tool_history
from chairlift.server.tools import offer_of
from chairlift.server.wire.base import Sampled
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.parameters import CHAT, COMPLETIONS

MOST_CHARACTERS = 256
"""Of a token: twice what the longest in any vocabulary known to us has. A text that exceeds the context even
so is not tokenized, which would hold up everybody else's prompts for seconds a megabyte."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default on /v1/completions; a chat answer runs to the end of the context."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one body asks for: a choice for every request, in order."""

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    echoes: tuple[Echo, ...] = ()
    """What the text of each choice that is shown begins with; empty unless `echo`."""
    silent: bool = False
    """The prompt alone is wanted, and no answer to it."""
    make_parser: Callable[[], OutputParser] = PlainParser
    """Of an answer; each has a parser of its own."""
    include_reasoning: bool = True
    """The client wants to see the thinking."""
    may_call: bool = False
    """An answer may hold calls."""
    choices: Choices = Choices()
    """`requests` holds those of a prompt one after the other."""
    logprobs: bool = False
    """The client asked for them."""


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A chat request whose parameters are checked and whose images are still to be read."""

    wire: ChatRequest
    sampling: SamplingParams
    images: tuple[ImageReference, ...]
    choices: Choices = Choices()
    content: Asked | None = None
    """What the answer's content must follow."""


def parse_chat(
    raw: bytes,
    tokenizer: Tokenizer,
    info: ModelInfo,
    settings: ServerSettings,
    *,
    takes_images: bool,
    defaults: Mapping[str, float],
) -> ParsedChat:
    """Raises: APIError with 4xx."""
    wire = parse(raw, ChatRequest, CHAT, settings.max_json_depth)
    check_tool_history(wire.messages)
    return check_chat(wire, tokenizer, info, takes_images=takes_images, defaults=defaults)


def check_chat(
    wire: ChatRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
    *,
    takes_images: bool,
    defaults: Mapping[str, float],
) -> ParsedChat:
    """`defaults`: parameters that count where the request has none. Raises: APIError with 4xx."""
    wire = with_defaults(wire, defaults)
    check_room(len(wire.messages), "messages", info, "messages")
    check_room(sum(map(characters, wire.messages)), "characters", info, "messages")
    sampling = chat_sampling(wire, tokenizer)
    images = tuple(image_references(wire))
    if images and not takes_images:
        where = images[0].param
        raise invalid(f"{where} is an image, and {info.name} takes text only.", where, "unsupported_value")
    return ParsedChat(wire, sampling, images, choices_of(wire.n), content_of(wire, wire.ignore_eos))


def chat_sampling(wire: ChatRequest, tokenizer: Tokenizer | None) -> SamplingParams:
    """`tokenizer`: as for `sampling_params`. Raises: APIError with 4xx."""
    _check_common(wire)
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
    return sampling_params(
        wire,
        tokenizer,
        max_tokens=max_tokens,
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        spelled={"max_tokens": spelled, "logprobs": "top_logprobs"},
    )


def prepare_chat(
    chat: ParsedChat,
    images: Sequence[ImageInput],
    request_id: str,
    tokenizer: Tokenizer,
    processor: MediaProcessor | None,
    settings: ServerSettings,
    output: OutputFormat,
    compiler: Compiler | None,
) -> Prepared:
    """Raises: APIError with 4xx."""
    wire = chat.wire
    offer = offer_of(wire)
    prompt, media = render(
        wire,
        images,
        tokenizer,
        processor,
        settings.max_json_depth,
        tools=offer.tools,
        variables=template_variables(wire, tokenizer, output),
    )
    if not prompt:
        raise invalid("The chat template made an empty prompt of messages.", "messages", "invalid_value")
    said = text_gone_on_with(wire)
    prompt_end = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
    prefix = output.prefix(prompt_end) if said is None else output.opened(said)
    begins = said is None and not output.closes(prompt_end)
    constraint = answer_constraint(
        wire, chat.content, offer, output, compiler, thinks=bool(prefix), begins=begins
    )
    request = Request(
        request_id,
        tuple(prompt),
        chat.sampling,
        priority=wire.priority or 0,
        cache_salt=wire.cache_salt or "",
        media=media,
        visible_token_ids=output.visible,
        constraint=constraint,
        thinking=thinking_budget(wire, tokenizer, output, prefix, prompt_end),
    )
    return Prepared(
        chat.choices.requests([request]),
        bool(wire.stream),
        _include_usage(wire),
        make_parser=partial(
            output.parser,
            prefix=prefix,
            tools=offer.callable,
            parallel=offer.parallel,
            forced=offer.forced,
        ),
        include_reasoning=wire.include_reasoning is not False,
        may_call=bool(offer.callable),
        choices=chat.choices,
        logprobs=bool(wire.logprobs),
    )


def prepare_completions(
    raw: bytes,
    request_id: str,
    tokenizer: Tokenizer,
    info: ModelInfo,
    settings: ServerSettings,
    compiler: Compiler | None,
    defaults: Mapping[str, float],
) -> Prepared:
    """Raises: APIError with 4xx."""
    wire = with_defaults(parse(raw, CompletionRequest, COMPLETIONS, settings.max_json_depth), defaults)
    silent = _is_silent(wire)
    sampling = completion_sampling(wire, tokenizer)
    if wire.echo and wire.logprobs is not None:
        if not info.scores_prompts:
            raise unsupported("echo", "echo together with logprobs is not supported for this model.")
        sampling = replace(sampling, prompt_logprobs=wire.logprobs)
    prompts = _prompts(wire, tokenizer, info, settings.max_prompts)
    choices = choices_of(wire.n, wire.best_of, prompts=len(prompts), stream=bool(wire.stream))
    if choices.ranked and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    content = content_of(wire, wire.ignore_eos)
    constraint = constraint_of(content, compiler) if content is not None else None
    requests = [
        Request(
            name,
            tokens,
            sampling,
            wire.priority or 0,
            cache_salt=wire.cache_salt or "",
            constraint=constraint,
        )
        for name, (tokens, _) in zip(ids, prompts, strict=True)
    ]
    echoes: list[Echo] = []
    for tokens, text in prompts if wire.echo else ():
        echo = Echo(tokenizer.decode(list(tokens)) if text is None else text, tokens)
        echoes += [echo] * choices.shown
    return Prepared(
        choices.requests(requests),
        bool(wire.stream),
        _include_usage(wire),
        tuple(echoes),
        silent,
        choices=choices,
        logprobs=wire.logprobs is not None,
    )


def _is_silent(wire: CompletionRequest) -> bool:
    return bool(wire.echo) and wire.max_tokens == 0


def completion_sampling(wire: CompletionRequest, tokenizer: Tokenizer | None) -> SamplingParams:
    """`tokenizer`: as for `sampling_params`. Raises: APIError with 4xx."""
    _check_common(wire)
    max_tokens = COMPLETION_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens
    return sampling_params(
        wire,
        tokenizer,
        max_tokens=1 if _is_silent(wire) else max_tokens,
        logprobs=wire.logprobs,
        spelled={},
    )


def _check_common(wire: Sampled) -> None:
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise invalid(
            "stream_options is only allowed when stream is true.", "stream_options", "invalid_value"
        )
    if options is not None and options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats")


def check_room(size: int, unit: str, info: ModelInfo, param: str) -> None:
    """What is far too long is refused before anything is made of it; the engine does the exact count."""
    if size > info.context_length * (MOST_CHARACTERS if unit == "characters" else 1):
        raise invalid(
            f"{param} has {size} {unit}; this model's context holds {info.context_length} tokens, no more.",
            param,
            "context_length_exceeded",
        )


def _include_usage(wire: Sampled) -> bool:
    return bool(wire.stream_options and wire.stream_options.include_usage)


def prompts_of(wire: CompletionRequest, most: int) -> list[tuple[str, str | tuple[int, ...]]]:
    """The place of each prompt, and its text or tokens, which may be no model's. Raises: APIError: 400."""
    given = wire.prompt
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts: list[object] = list(given) if several else [given]
    if len(prompts) > most:
        raise invalid(f"prompt holds {len(prompts)} prompts; at most {most}.", "prompt", "invalid_value")
    found: list[tuple[str, str | tuple[int, ...]]] = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if several else "prompt"
        if not prompt:
            raise invalid(f"{param} is empty: it must hold at least one token.", param, "invalid_value")
        if not isinstance(prompt, str):
            assert isinstance(prompt, list)
            prompt = tuple(prompt)
            check_vocabulary(prompt, None, param)
        found.append((param, prompt))
    return found


def _prompts(
    wire: CompletionRequest, tokenizer: Tokenizer, info: ModelInfo, most: int
) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens of each prompt, and its text where the client sent text."""
    result: list[tuple[tuple[int, ...], str | None]] = []
    for param, prompt in prompts_of(wire, most):
        if isinstance(prompt, str):
            check_room(len(prompt), "characters", info, param)
            tokens = tuple(tokenizer.encode(prompt))
            if not tokens:
                raise invalid(f"{param} makes no token.", param, "invalid_value")
            result.append((tokens, prompt))
        else:
            check_room(len(prompt), "tokens", info, param)
            check_vocabulary(prompt, tokenizer, param)
            result.append((prompt, None))
    return result
