"""Arguments in XML: the types of their schemas, and what is written of them."""

from __future__ import annotations

import json

import pytest

from chairlift.engine.constraints.pieces import Either, Json, Literal, Repeat, Sequence, Until
from chairlift.engine.errors import InvalidParameter
from chairlift.engine.output.parameters import KEY, ParameterWriting, types_of, with_types
from chairlift.engine.output.whole_calls import UpstreamCalls

ROOT = {
    "$defs": {
        "Size": {"type": "integer"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
        "a/b": {"type": "boolean"},
        "Bush": {"anyOf": [{"$ref": "#/$defs/Bush"}] * 9 + [{"$ref": "#/$defs/Twig"}, {"type": "null"}]},
        "Twig": {"oneOf": [{"$ref": "#/$defs/Bush"} for _ in range(9)] + [{"type": "integer"}]},
    },
    "properties": {
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/Size"},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "free": {},
        "real": {"type": ["number", "null"]},
        "level": {"enum": [1, 2]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Size"}},
        "tree": {"$ref": "#/$defs/Tree"},
    },
    "required": ["maybe"],
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["number", "null"]}, {"number", "null"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, {"integer", "null"}),
        ({"$ref": "#/$defs/Size"}, {"integer"}),
        ({"$ref": "#/$defs/Tree"}, {"null"}),
        ({"$ref": "#/$defs/None"}, set()),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/properties/maybe/anyOf/0"}, {"integer"}),
        ({"$ref": "#/$defs/Bush"}, {"null", "integer"}),
        (
            {"enum": ["a", 1, 1.5, True, None, [], {}]},
            {"string", "integer", "number", "boolean", "null", "array", "object"},
        ),
        ({"const": 1}, {"integer"}),
        ({}, set()),
    ],
)
def test_types(schema: dict[str, object], types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_text_that_its_schema_says_is_none() -> None:
    given: dict[str, object] = {
        "maybe": "7",
        "size": "many",
        "either": "7",
        "free": "7",
        "real": "7",
        "level": "2",
        "list": "[1]",
        "tree": "null",
        "unknown": "7",
    }
    assert with_types(given, ROOT) == {
        **given,
        "maybe": 7,
        "real": 7,
        "level": 2,
        "list": [1],
        "tree": None,
    }
    assert with_types({"a": "1"}, None) == {"a": "1"}


def test_alternatives_behind_upstreams_back() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": ROOT}}
    body = (
        "<function=f>\n<parameter=maybe>\n7\n</parameter>\n<parameter=either>\n7\n</parameter>\n</function>"
    )
    ((name, arguments),) = UpstreamCalls("qwen3_coder")(body, [tool])
    assert (name, json.loads(arguments)) == ("f", {"maybe": 7, "either": "7"})


def test_what_is_written() -> None:
    writing = ParameterWriting(f"<{KEY}>", "</>")
    schema = {
        "properties": {
            "s": {"type": "string"},
            "e": {"enum": ["a", 1]},
            "c": {"const": "x"},
            "i": {"$ref": "#/$defs/Size"},
        },
        "required": ["s", "i"],
        "$defs": {"Size": {"type": "integer"}},
    }
    end = Literal("</>")
    choice = Either((Literal("a", plain=True), Literal("1", plain=True)))
    sized = json.dumps({"$ref": "#/$defs/Size", "$defs": schema["$defs"]})
    assert writing.parameters(schema, strict=True) == Sequence(
        (
            Sequence((Literal("<s>"), Until("</>"))),
            Repeat(Sequence((Literal("<e>"), choice, end)), 0, 1),
            Repeat(Sequence((Literal("<c>"), Literal("x", plain=True), end)), 0, 1),
            Sequence((Literal("<i>"), Json(sized, True), end)),
        )
    )


def test_what_no_text_can_be_held_to() -> None:
    writing = ParameterWriting(f"<{KEY}>", "</>")
    schema = {"properties": {"s": {"type": "string", "pattern": "a+"}}}
    with pytest.raises(InvalidParameter, match="pattern of s"):
        writing.parameters(schema, strict=True)
    assert writing.parameters(schema, strict=False) == Sequence(
        (Repeat(Sequence((Literal("<s>"), Until("</>"))), 0, 1),)
    )
