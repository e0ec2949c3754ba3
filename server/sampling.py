"""How answers are drawn, from what a body says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.plan import Tokenizer
from chairlift.engine.request import SamplingParams
from chairlift.server.errors import invalid
from chairlift.server.wire.base import Sampled

S = TypeVar("S", bound=Sampled)

AS_THEY_ARE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "ignore_eos",
)
"""Parameters that the wire and the engine call alike; where one is left out, the engine's default counts."""


def with_defaults(wire: S, defaults: Mapping[str, float]) -> S:
    """The request with the model's defaults for what it leaves out."""
    missing: dict[str, object] = {
        name: value
        for name, value in defaults.items()
        if name in type(wire).model_fields and getattr(wire, name) is None
    }
    if getattr(wire, "max_completion_tokens", None) is not None:
        missing.pop("max_tokens", None)
    return wire.model_copy(update=missing) if missing else wire


def sampling_params(
    wire: Sampled,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    spelled: Mapping[str, str],
) -> SamplingParams:
    """From a request.

    Args:
        tokenizer: None, while there is no model: then tokens may be any number that a vocabulary might have.
        spelled: the client's name of a parameter, where the engine has another.

    Raises: APIError with 400."""
    given: dict[str, Any] = {
        name: value for name in AS_THEY_ARE if (value := getattr(wire, name)) is not None
    }
    stop = () if wire.stop is None else wire.stop
    stop_token_ids = tuple(wire.stop_token_ids or ())
    check_vocabulary(stop_token_ids, tokenizer, "stop_token_ids")
    if wire.allowed_token_ids is not None:
        given["allowed_token_ids"] = tuple(wire.allowed_token_ids)
        check_vocabulary(given["allowed_token_ids"], tokenizer, "allowed_token_ids")
    if wire.logit_bias is not None:
        given["logit_bias"] = _logit_bias(wire.logit_bias, tokenizer)
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            **given,
        )
    except InvalidParameter as error:
        name = spelled.get(error.param, error.param)
        raise invalid(error.message.replace(error.param, name, 1), name, "invalid_value") from None
    if tokenizer is not None:
        _check_ends(sampling, tokenizer)
    return sampling


def check_vocabulary(token_ids: tuple[int, ...], tokenizer: Tokenizer | None, param: str) -> None:
    """`tokenizer`: as for `sampling_params`. Raises: APIError naming the first that is no token."""
    if token_ids and min(token_ids) < 0:
        at, token = next((at, token) for at, token in enumerate(token_ids) if token < 0)
        where = f"{param}[{at}]"
        raise invalid(f"{where} is {token}; tokens are numbered from 0.", where, "invalid_value")
    if tokenizer is None:
        return
    size = tokenizer.vocab_size
    if token_ids and max(token_ids) >= size:
        at, token = next((at, token) for at, token in enumerate(token_ids) if token >= size)
        raise invalid(
            f"{param}[{at}] is {token}, which is not a token of this model (0 to {size - 1}).",
            f"{param}[{at}]",
            "invalid_value",
        )


def _logit_bias(biases: Mapping[str, float], tokenizer: Tokenizer | None) -> dict[int, float]:
    """By token id. Raises: APIError for a key that is none."""
    size = None if tokenizer is None else tokenizer.vocab_size
    result: dict[int, float] = {}
    for key, bias in biases.items():
        # int() takes signs, spaces, underscores and other scripts' digits, which no client means.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(
                f"logit_bias has the key {key[:40]!r}, which is no number of a token.",
                "logit_bias",
                "invalid_value",
            )
        if size is not None and int(key) >= size:
            raise invalid(
                f"logit_bias has the key {key[:40]!r}, which is not a token of this model (0 to {size - 1}).",
                "logit_bias",
                "invalid_value",
            )
        if int(key) in result:
            raise invalid(f"logit_bias names token {int(key)} twice.", "logit_bias", "invalid_value")
        result[int(key)] = bias
    return result


def _check_ends(sampling: SamplingParams, tokenizer: Tokenizer) -> None:
    """`min_tokens` must leave something to draw."""
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else tokenizer.eos_token_ids)}
    allowed = sampling.allowed_token_ids
    if sampling.min_tokens and allowed is not None and ends.issuperset(allowed):
        raise invalid(
            "allowed_token_ids holds only tokens that end the answer, which min_tokens forbids at first.",
            "allowed_token_ids",
            "invalid_value",
        )
