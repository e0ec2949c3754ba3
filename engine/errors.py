"""What the engine refuses or fails with.

Every error carries one line fit for the person who sent the request: no path, no stack trace, no name of
an internal. Surfaces translate the class into their own status and code (`chairlift.server.errors`).
"""

from __future__ import annotations

from chairlift.engine.quantities import size


class EngineError(Exception):
    """A request was refused or could not be finished. `message` is fit for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidParameter(EngineError, ValueError):
    """A value that cannot be served; `param` names it as the caller spelled it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidParameter):
    """The prompt leaves no room for an answer within the model's context."""


class MemoryExceeded(ContextLengthExceeded):
    """The request could not be held in memory even if it were the only one.

    Attributes:
        needed: bytes.
        available: bytes for requests, when there are no others.
        most: tokens of prompt and answer together that fit, whatever is prompt and what answer.
    """

    def __init__(
        self, param: str, *, needed: int, available: int, prompt: int, answer: int, most: int
    ) -> None:
        what = f"The prompt has {prompt} tokens"
        if param != "prompt":
            what += f" and the answer may have {answer}"
        super().__init__(
            param,
            f"{what}: this server would need {size(needed, 4)} of memory for the request and has "
            f"{size(available, 4)}. Up to {most} tokens fit, prompt and answer together.",
        )
        self.needed = needed
        self.available = available
        self.most = most


class QueueFull(EngineError):
    """The wait queue is at its bound; come back after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


SHUTTING_DOWN = "The model is shutting down."


class EngineStopped(EngineError):
    """The engine is draining or has stopped, and admits nothing."""


class StepFailed(EngineError):
    """The model step that this request was part of raised; its rows are gone, the engine goes on."""


class ModelUnavailable(EngineError):
    """The model could not be found, fetched, read or loaded. The message is one clear line."""
