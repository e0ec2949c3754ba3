"""What a model failed with: in full for the operator, without paths for clients."""

from __future__ import annotations

import logging
import re

from chairlift.engine.errors import EngineError, ModelUnavailable

logger = logging.getLogger("chairlift.server")


def as_fault(error: BaseException, what: str) -> EngineError:
    """What ended a load, on one line; where that was no refusal, its trace is in the log.

    Args:
        what: was to be loaded.
    """
    if isinstance(error, EngineError):
        return error
    logger.error("loading %s failed", what, exc_info=error)
    return ModelUnavailable(
        f"The model could not be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
    )


def does_not_fit(name: str, reason: str) -> ModelUnavailable:
    return ModelUnavailable(f"{name} does not fit: {reason} (--memory-limit).")


_PATH = re.compile(r"(?:(?<![\w/.~-])[~.]{0,2}/[^\s'\",:;()]*|[A-Za-z]:\\[^\s'\",;()]*)")


def without_paths(message: str) -> str:
    """A message that clients may read: of paths only the last part is left."""
    return _PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1] or "the folder", message)
