"""Recorded answers of model families, and how each is to be read: `shapes/FAMILY.json`.

A shape is [what it shows, the text, how the answer came, events]. Events: ["r", thinking], ["c", content],
["t", name, arguments] for a whole call, ["b", name, arguments] for one that broke off. How the answer came:
`open`: the prompt opens the thinking. `end`: "length" or "string" (a stop string). `stop`: the text of the
token that ended it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from chairlift.engine.events import Finished, FinishReason, TextDelta, Usage
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.engine.output.formats import OutputFormat, choose_format
from tests.fake_tokenizer import FakeTokenizer

FOLDER = Path(__file__).parent / "shapes"
USAGE = Usage(1, 1)
STOP_TOKEN = 260


def function(name: str, **properties: dict[str, object]) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (
    function("f", a={"type": "integer"}, s={"type": "string"}),
    function("look", at={"type": "string"}),
    function("wait"),
    function(
        "g",
        b={"type": "boolean"},
        o={"type": "object"},
        l={"type": "array"},
        n={"type": "number"},
        e={"enum": ["x y", "z"]},
    ),
)

Said = list[tuple[str, ...]]


@dataclass(frozen=True)
class Shape:
    family: str
    note: str
    text: str
    events: tuple[tuple[str, ...], ...]
    format: OutputFormat
    open: bool = False
    end: str = "stop"
    stop: str = ""

    def __str__(self) -> str:
        return f"{self.family}: {self.note}"

    @property
    def finished(self) -> Finished:
        if self.end == "length":
            return Finished(FinishReason.LENGTH, USAGE)
        return Finished(FinishReason.STOP, USAGE, "stop" if self.end == "string" else STOP_TOKEN)

    @property
    def prefix(self) -> str:
        return self.format.thinking.start if self.open and self.format.thinking else ""

    def read(self, pieces: Sequence[str]) -> tuple[list[OutputEvent], OutputEnd]:
        """Fed the pieces, one token each."""
        numbers = count()
        parser = self.format.parser(prefix=self.prefix, tools=TOOLS, make_id=lambda: f"id{next(numbers)}")
        events: list[OutputEvent | OutputEnd] = []
        for piece in pieces:
            events += parser.feed(TextDelta((1,), piece))
        events += parser.finish(self.finished)
        *said, end = events
        assert isinstance(end, OutputEnd)
        return [event for event in said if not isinstance(event, OutputEnd)], end


def shapes() -> list[Shape]:
    found: list[Shape] = []
    for path in sorted(FOLDER.glob("*.json")):
        families = json.loads(path.read_text(encoding="utf-8"))
        for family in families if isinstance(families, list) else [families]:
            for note, text, how, events in family["shapes"]:
                specials = [how["stop"]] if "stop" in how else []
                format = choose_format(
                    FakeTokenizer(specials=specials), reasoning=family["reasoning"], tool_call=family["tools"]
                )
                name = path.stem if family is families else f"{path.stem} {family['tools']}"
                found.append(Shape(name, note, text, tuple(map(tuple, events)), format, **how))
    return found


def said(events: Sequence[OutputEvent]) -> Said:
    """The events as shapes write them; checks their order and numbering on the way."""
    result: Said = []
    open_call: int | None = None
    calls = 0
    for event in events:
        match event:
            case ContentDelta() | ReasoningDelta() | RefusalDelta():
                assert event.text, "an empty delta"
                kind = {"ContentDelta": "c", "ReasoningDelta": "r", "RefusalDelta": "x"}[type(event).__name__]
                if result and result[-1][0] == kind:
                    result[-1] = (kind, result[-1][1] + event.text)
                else:
                    result.append((kind, event.text))
            case ToolCallStart():
                assert (event.index, event.id) == (calls, f"id{calls}")
                open_call, calls = event.index, calls + 1
                result.append(("b", event.name, ""))
            case ToolCallArguments():
                assert event.index == open_call and event.text
                result[-1] = ("b", result[-1][1], result[-1][2] + event.text)
            case ToolCallEnd():
                assert event.index == open_call
                open_call = None
                result[-1] = ("t", *result[-1][1:])
    return result


def reason(shape: Shape) -> EndReason:
    """What the end must be called, by the shape's own events."""
    if shape.end == "length":
        return EndReason.LENGTH
    whole = any(event[0] == "t" for event in shape.events)
    return EndReason.TOOL_CALLS if whole else EndReason.STOP
