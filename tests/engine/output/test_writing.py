"""Calls written as a constraint has them are read by the format's own parser."""

from __future__ import annotations

import json

import pytest

from chairlift.engine.constraints.pieces import Either, Json, Literal, Piece, Regex, Repeat, Sequence, Until
from chairlift.engine.events import Finished, FinishReason, TextDelta
from chairlift.engine.output.events import OutputEnd
from chairlift.engine.output.formats import TOOL_CALL_PARSERS, choose_format
from chairlift.engine.output.writing import HARMONY_WRITING, schema_of
from tests.engine.output.shapes_of import TOOLS, USAGE, said
from tests.fake_tokenizer import FakeTokenizer

VALUES = {"object": '{"a": 1}', "integer": "7", "boolean": "true", "array": "[1]", "number": "1.5"}
XML = ({"a": 7, "s": "x y"}, {"at": "x y"}, {}, {"b": True, "o": {"a": 1}, "l": [1], "n": 1.5, "e": "z"})
"""What follows of the arguments of each tool, where they are parameters."""


def text_of(piece: Piece, choice: int, times: int = 2) -> str:
    """What follows the piece: this alternative, so often."""
    match piece:
        case Literal():
            return piece.text
        case Json():
            kind = json.loads(piece.schema)["type"]
            return VALUES[kind]
        case Until():
            return f"x y{piece.mark}"
        case Regex():
            return "0"
        case Sequence():
            return "".join(text_of(part, choice) for part in piece.pieces)
        case Either():
            return text_of(piece.pieces[min(choice, len(piece.pieces) - 1)], choice)
        case Repeat():
            between = "" if piece.between is None else text_of(piece.between, choice)
            return between.join([text_of(piece.piece, choice)] * min(times, piece.most or times))
        case _:
            raise AssertionError(piece)


@pytest.mark.parametrize("template", ["", "[ARGS]", "```json"])
@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_what_is_written_is_read(name: str, template: str) -> None:
    format = choose_format(FakeTokenizer(template=template), reasoning="none", tool_call=name)
    writing = HARMONY_WRITING if format.harmony else format.forced_writing
    for parallel in (False, True) if not format.harmony else (False,):
        for choice, tool in enumerate(TOOLS):
            ids = iter(range(9))
            parser = format.parser(tools=TOOLS, forced=True, make_id=lambda ids=ids: f"id{next(ids)}")
            events = parser.feed(TextDelta((1,), text_of(writing.calls(TOOLS, parallel=parallel), choice)))
            *rest, _ = parser.finish(Finished(FinishReason.STOP, USAGE, 5))
            events += [event for event in rest if not isinstance(event, OutputEnd)]
            function = tool["function"]
            assert isinstance(function, dict)
            expected = VALUES["object"] if writing.parameters is None else json.dumps(XML[choice])
            assert said(events) == [("t", function["name"], expected)] * (2 if parallel else 1)


def test_the_rest_behind_a_mark() -> None:
    for name in TOOL_CALL_PARSERS:
        writing = choose_format(FakeTokenizer(), tool_call=name).writing
        if writing is not None and writing.mark:
            rest = text_of(writing.rest(TOOLS[:1], parallel=False), 0)
            assert writing.mark + rest == text_of(writing.calls(TOOLS[:1], parallel=False), 0)


def test_schemas_of_arguments() -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema_of(None) == schema_of({}) == nothing
    assert schema_of({"type": "object", "properties": {}, "title": "Nothing"}) == nothing
    given = {"properties": {}, "additionalProperties": {"type": "string"}}
    assert schema_of(given) == {"type": "object", **given}
    assert schema_of({"properties": {"a": {}}}) == {"type": "object", "properties": {"a": {}}}
