"""What a running request says: a stream of `TextDelta`, ended by exactly one `Finished` or `Failed`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from chairlift.engine.errors import EngineError


class FinishReason(StrEnum):
    """Why an answer ended, in the field's words."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the model's context."""
    ABORT = "abort"
    """Cancelled: the client left."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities under the model (temperature 1, no filter)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most probable first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, exact. `completion_tokens` counts what was generated for the answer,
    an end-of-sequence token included where it ended on one."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Newly drawn tokens and the text they complete. `text` may be empty while a character or a possible
    stop string is still in flight, or hold characters of earlier tokens; it never holds a U+FFFD that a
    later token would have completed. Concatenated, the texts of a request are its whole answer."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    lengths: tuple[int, ...] = field(default=(), compare=False)
    """Characters of `text` that each of the tokens completed, so that joined deltas can be told apart again;
    empty where nobody counted."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    """The stop string or token id that ended it; None at `length` and `abort`."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: EngineError
    usage: Usage


Event = TextDelta | Finished | Failed
