"""Which schemas have a finite value: what the check says against a search for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.constraints.schema import SchemaError, read

NAMES = ("a", "b", "c")
REFERENCE = st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/$defs/{name}"})
LEAF = st.sampled_from(({"type": "null"}, {"type": "string"}, {"enum": [1]}, {}))
Schema = dict[str, object]


def grown(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    some = st.lists(inner, min_size=1, max_size=2)
    required = st.dictionaries(st.sampled_from(("x", "y")), inner, max_size=2)
    return st.one_of(
        some.map(lambda parts: {"anyOf": parts}),
        some.map(lambda parts: {"allOf": parts}),
        st.builds(
            lambda parts, must: {"type": "object", "properties": parts, "required": must and list(parts)},
            required,
            st.booleans(),
        ),
        st.builds(
            lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 2)
        ),
    )


PART: st.SearchStrategy[Schema] = st.recursive(st.one_of(REFERENCE, REFERENCE, LEAF), grown, max_leaves=4)


def satisfiable(schema: Schema, named: dict[str, Schema], height: int) -> bool:
    """A value of at most this height satisfies it. Exponential, and plain."""
    if height < 0:
        return False
    inner = [satisfiable(part, named, height) for part in schema.get("anyOf", [])]  # type: ignore[attr-defined]
    if inner and not any(inner):
        return False
    if "$ref" in schema:
        return satisfiable(named[str(schema["$ref"]).rsplit("/", 1)[1]], named, height - 1)
    if "allOf" in schema:
        return all(satisfiable(part, named, height) for part in schema["allOf"])  # type: ignore[attr-defined]
    if schema.get("type") == "object" and schema["required"]:
        parts: dict[str, Schema] = schema["properties"]  # type: ignore[assignment]
        return all(satisfiable(part, named, height - 1) for part in parts.values())
    if schema.get("type") == "array" and schema["minItems"]:
        return satisfiable(schema["items"], named, height - 1)  # type: ignore[arg-type]
    return True


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.fixed_dictionaries(dict.fromkeys(NAMES, PART)))
def test_finite_values(named: dict[str, Schema]) -> None:
    root: Schema = {"$ref": "#/$defs/a", "$defs": named}
    try:
        read(json.dumps(root))
        finite = True
    except SchemaError as error:
        assert "without an end" in str(error)
        finite = False
    assert finite == satisfiable(named["a"], named, 6)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a number is no object
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"type": "object", "patternProperties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b~1c"}, "b/c": {}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#elsewhere"}}, "required": ["a"]},
        {"type": "array", "items": [{}, {"$ref": "#"}], "minItems": 1},
        {"const": {"a": 1}, "allOf": [{"type": "object"}]},
    ],
)
def test_schemas_with_an_end(schema: Schema) -> None:
    assert read(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        {"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 2},
        {"type": "array", "items": [{}, {"$ref": "#"}], "minItems": 2},
        {"oneOf": [{"$ref": "#"}]},
        {"allOf": [{}, {"$ref": "#"}]},
    ],
)
def test_schemas_without_an_end(schema: Schema) -> None:
    with pytest.raises(SchemaError, match="without an end"):
        read(json.dumps(schema))


@pytest.mark.parametrize("multiple", [5, 0.01, 10_000, 0.0001, 1.5, "x", -3, True, 0, None])
def test_multiples_that_pass(multiple: object) -> None:
    assert read(json.dumps({"multipleOf": multiple}))


@pytest.mark.parametrize("multiple", [10_001, 1.0001, 1e300, 123456.7])
def test_multiples_that_do_not(multiple: object) -> None:
    with pytest.raises(SchemaError, match="multipleOf"):
        read(json.dumps({"multipleOf": multiple}))
