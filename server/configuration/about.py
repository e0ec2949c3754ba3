"""What people are told of settings, and checks that several share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator


class Group(StrEnum):
    """Settings that belong together, in the order in which they are shown."""

    MODELS = "Models"
    LISTENING = "Listening"
    SECURITY = "Security"
    REQUESTS = "Requests and steps"
    PREFIXES = "Kept prefixes"
    READING = "Reading answers"
    IMAGES = "Images"
    RESPONSES = "Kept responses"
    LOGS = "Logs"
    METRICS = "Metrics and traces"
    SUPERVISION = "Keeping it running"


@dataclass(frozen=True, slots=True)
class About:
    """What people are told of a setting."""

    group: Group
    help: str
    metavar: str | None = None
    """What stands for the value in `--help`; by default its type."""
    flag: bool = True
    """False: only a file or the environment has it."""


def _known_reasoning(name: str | None) -> str | None:
    from chairlift.engine.output.formats import REASONING_PARSERS  # takes half a second

    return _known(name, REASONING_PARSERS)


def _known_tool_call(name: str | None) -> str | None:
    from chairlift.engine.output.formats import TOOL_CALL_PARSERS

    return _known(name, TOOL_CALL_PARSERS)


def _known(name: str | None, known: tuple[str, ...]) -> str | None:
    if name is not None and name not in known:
        raise ValueError(f"{name!r} is unknown; choose from {', '.join(known)}.")
    return name


ReasoningParser = Annotated[str | None, AfterValidator(_known_reasoning)]
ToolCallParser = Annotated[str | None, AfterValidator(_known_tool_call)]
