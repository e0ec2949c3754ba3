"""Calls written as a constraint has them are read by the format's own parser."""

from __future__ import annotations

import pytest

from chairlift.engine.constraints.pieces import Either, Json, Literal, Piece, Regex, Repeat, Sequence
from chairlift.engine.events import Finished, FinishReason, TextDelta
from chairlift.engine.output.events import OutputEnd
from chairlift.engine.output.formats import TOOL_CALL_PARSERS, choose_format
from chairlift.engine.output.writing import HARMONY_WRITING, schema_text
from tests.engine.output.shapes_of import TOOLS, USAGE, said
from tests.fakes import FakeTokenizer

ARGUMENTS = '{"a": 1}'


def text_of(piece: Piece, choice: int, times: int = 2) -> str:
    """What follows the piece: this alternative, so often."""
    match piece:
        case Literal():
            return piece.text
        case Json():
            return ARGUMENTS
        case Regex():
            return "0"
        case Sequence():
            return "".join(text_of(part, choice) for part in piece.pieces)
        case Either():
            return text_of(piece.pieces[choice], choice)
        case Repeat():
            between = "" if piece.between is None else text_of(piece.between, choice)
            return between.join([text_of(piece.piece, choice)] * times)
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
            assert said(events) == [("t", function["name"], ARGUMENTS)] * (2 if parallel else 1)


def test_the_rest_behind_a_mark() -> None:
    for name in TOOL_CALL_PARSERS:
        writing = choose_format(FakeTokenizer(), tool_call=name).writing
        if writing is not None and writing.mark:
            rest = text_of(writing.rest(TOOLS[:1], parallel=False), 0)
            assert writing.mark + rest == text_of(writing.calls(TOOLS[:1], parallel=False), 0)


def test_schemas_of_arguments() -> None:
    assert (
        schema_text(None)
        == schema_text({})
        == ('{"type": "object", "properties": {}, "additionalProperties": false}')
    )
    assert schema_text({"properties": {}}) == '{"type": "object", "properties": {}}'
