"""What a client asks for, validated once. Nothing downstream checks again.

Pure Python: no mlx, no asyncio, no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.engine.constraints.constraint import Constraint
from chairlift.engine.errors import InvalidParameter
from chairlift.engine.media import PreparedMedia
from chairlift.engine.thinking import ThinkingBudget

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters of a stop string: what is made of them for the search is made on the event loop."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024
"""Entries of logit_bias."""
MAX_REPETITION = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are drawn and where it ends.

    Raises:
        InvalidParameter: (a `ValueError`) naming the first field that cannot be served.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None runs to the end of the model's context."""
    temperature: float = 1.0
    """0 is greedy; at most 2."""
    top_p: float = 1.0
    """Nucleus: keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 (or -1, as vLLM spells it) keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0 drops none."""
    xtc_probability: float = 0.0
    """How often a draw leaves the most probable tokens out (xtc, "exclude top choices"); never if greedy."""
    xtc_threshold: float = 0.1
    """Where xtc strikes, all tokens more probable than this but the least probable of them; at most 0.5."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that it was drawn before; -2 to 2."""
    presence_penalty: float = 0.0
    """Taken off the logit of a token that was drawn before; -2 to 2."""
    repetition_penalty: float = 1.0
    """The logit of a token of prompt or answer is divided by this where positive, else multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token: what is added to its logit, -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """No other token is drawn; None allows all."""
    min_tokens: int = 0
    """Before so many tokens are drawn, no token and no stop string ends the answer."""
    seed: int | None = None
    """The same seed, prompt and settings draw the same tokens, alone or in any batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the match is not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """None: no log probabilities. n: those of the drawn token and of the n most probable ones."""
    prompt_logprobs: int | None = None
    """The same, of the prompt's tokens but the first. Such a prompt begins with no kept prefix."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
        _number("temperature", self.temperature, least=0, most=2)
        _number("top_p", self.top_p, least=0, most=1, open_at_least=True)
        _integer("top_k", self.top_k, least=0)
        _number("min_p", self.min_p, least=0, most=1)
        _number("xtc_probability", self.xtc_probability, least=0, most=1)
        _number("xtc_threshold", self.xtc_threshold, least=0, most=0.5)
        self._check_shaping()
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=MAX_SEED)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter(
                "stop", f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}."
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameter(
                    "stop", "stop must be a non-empty string or a list of non-empty strings."
                )
            if len(text) > MAX_STOP_LENGTH:
                raise InvalidParameter(
                    "stop", f"stop holds a string of {len(text)} characters; at most {MAX_STOP_LENGTH}."
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, least=0)
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, least=0, most=MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, least=0, most=MAX_LOGPROBS)

    def _check_shaping(self) -> None:
        _number("frequency_penalty", self.frequency_penalty, least=-2, most=2)
        _number("presence_penalty", self.presence_penalty, least=-2, most=2)
        _number(
            "repetition_penalty", self.repetition_penalty, least=0, most=MAX_REPETITION, open_at_least=True
        )
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidParameter(
                "logit_bias", f"logit_bias holds {len(self.logit_bias)} tokens; at most {MAX_BIASES}."
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, least=0)
            _number("logit_bias", bias, least=-100, most=100)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(self.allowed_token_ids))
            for token in allowed:
                _integer("allowed_token_ids", token, least=0)
            if not allowed:
                raise InvalidParameter("allowed_token_ids", "allowed_token_ids must hold at least one token.")
            object.__setattr__(self, "allowed_token_ids", allowed)
        _integer("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def counts_tokens(self) -> bool:
        """A token's logit depends on whether it came before."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def reads_prompt(self) -> bool:
        """The runner has to know the prompt's tokens beside the spans in which they come."""
        return self.counts_tokens or self.prompt_logprobs is not None

    @property
    def shapes_logits(self) -> bool:
        """The draw is made from other logits than the model's own."""
        return bool(
            self.counts_tokens or self.logit_bias or self.min_tokens or self.allowed_token_ids is not None
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt that is to be answered once. Made by a surface, owned by nobody: it never changes."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Smaller is sooner."""
    media: PreparedMedia | None = None
    """Images of the prompt, if there are any."""
    visible_token_ids: frozenset[int] = frozenset()
    """Special tokens whose text is part of the answer's text; that of the others is left out."""
    cache_salt: str = ""
    """Requests share kept prefixes only with those of the same salt."""
    constraint: Constraint | None = None
    """What the answer must follow; the end of the model's own answer is part of that."""
    thinking: ThinkingBudget | None = None
    """How long the answer may think; None: as long as it likes."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise InvalidParameter("prompt", "The prompt is empty: it must hold at least one token.")
        if self.constraint is not None and self.sampling.ignore_eos:
            raise InvalidParameter(
                "ignore_eos",
                "ignore_eos is not supported for an answer that must follow a schema or grammar.",
            )


def _integer(param: str, value: object, *, least: int | None = None, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, f"{param} must be an integer.")
    if least is not None and value < least:
        raise InvalidParameter(param, f"{param} must be at least {least}, not {value}.")
    if most is not None and value > most:
        raise InvalidParameter(param, f"{param} must be at most {most}, not {value}.")


def _number(param: str, value: object, *, least: float, most: float, open_at_least: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(param, f"{param} must be a finite number.")
    if value < least or (open_at_least and value == least):
        raise InvalidParameter(
            param, f"{param} must be {'above' if open_at_least else 'at least'} {least:g}, not {value:g}."
        )
    if value > most:
        raise InvalidParameter(param, f"{param} must be at most {most:g}, not {value:g}.")
