"""What is checked of a JSON Schema before it is compiled: its size, and that a finite value satisfies it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from urllib.parse import unquote

from chairlift.engine.constraints import regex
from chairlift.engine.constraints.horn import Clause, derivable

MOST_BYTES = 256 * 2**10
MOST_DEPTH = 64
MOST_MULTIPLE = 10_000
"""Of `multipleOf`, in units of its last decimal: llguidance counts remainders in states of an automaton."""
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})

Schema = Mapping[str, object]


class SchemaError(ValueError):
    """The message says what is wrong, as the end of a sentence that names the parameter."""


def read(text: str) -> Schema:
    """The schema, checked.

    Raises:
        SchemaError: no schema, too large a one, or one that no finite value satisfies.
    """
    size = len(text.encode())
    if size > MOST_BYTES:
        raise SchemaError(f"has {size} bytes; at most {MOST_BYTES}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise SchemaError(f"is nested more than {MOST_DEPTH} deep") from None
    except ValueError:
        raise SchemaError("is no JSON") from None
    if schema is True:
        schema = {}
    if schema is False:
        raise SchemaError("allows no value")
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON Schema: an object")
    _check_parts(schema)
    if id(schema) not in derivable(_clauses(schema)):
        raise SchemaError("refers to itself without an end: no finite value satisfies it")
    return schema


def _check_parts(schema: Schema) -> None:
    """Depth, patterns and `multipleOf`, wherever they stand."""
    multiple = 1
    for part, depth in parts(schema):
        if depth > MOST_DEPTH:
            raise SchemaError(f"is nested more than {MOST_DEPTH} deep")
        if not isinstance(part, dict):
            continue
        for pattern in _patterns(part):
            if (complaint := regex.complaint(pattern)) is not None:
                raise SchemaError(f"cannot be followed: {complaint}")
        multiple = math.lcm(multiple, _units(part.get("multipleOf")))
        if multiple > MOST_MULTIPLE:
            raise SchemaError(f"cannot be followed: multipleOf of more than {MOST_MULTIPLE} units")


def parts(value: object) -> Iterator[tuple[object, int]]:
    """Every object and list, with its depth from 1."""
    waiting = [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        yield part, depth
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        waiting += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]


def _patterns(part: Mapping[str, object]) -> Iterator[str]:
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(named := part.get("patternProperties"), dict):
        yield from named


def _units(multiple: object) -> int:
    """`multipleOf` as a whole number of its last decimal's units; 1 for none."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or multiple <= 0:
        return 1
    try:
        number = Decimal(str(multiple)).normalize()
    except InvalidOperation:
        return 1
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        return 1
    return MOST_MULTIPLE + 1 if exponent > 18 else int(number.scaleb(max(0, -exponent)))


def _clauses(root: Schema) -> list[Clause]:
    """When a finite value satisfies each schema that `root` reaches, by the identity of its object."""
    clauses: list[Clause] = []
    waiting: list[Schema] = [root]
    seen = {id(root)}

    def node(schema: object) -> object:
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) not in seen:
            seen.add(id(schema))
            waiting.append(schema)
        return id(schema)

    clauses.append((True, ()))
    while waiting:
        schema = waiting.pop()
        needed: list[object] = []
        if isinstance(reference := schema.get("$ref"), str):
            needed.append(node(target(root, reference)))
        needed += map(node, _list(schema.get("allOf")))
        for name in ("anyOf", "oneOf"):
            if choices := _list(schema.get(name)):
                choice = (id(schema), name)
                clauses += [(choice, (node(one),)) for one in choices]
                needed.append(choice)
        if "enum" not in schema and "const" not in schema and not _SCALARS & _types(schema):
            by_type = (id(schema), "type")
            if "object" in _types(schema):
                clauses.append((by_type, [node(part) for part in _required(schema)]))
            if "array" in _types(schema):
                clauses.append((by_type, [node(part) for part in _first_items(schema)]))
            needed.append(by_type)
        clauses.append((id(schema), needed))
    return clauses


def _types(schema: Schema) -> set[str]:
    """The types that the schema names; scalars too where it names none, or none that is known."""
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {name for name in _list(named) if isinstance(name, str)}
    return types if types & {"object", "array"} else set(_SCALARS)


def _required(schema: Schema) -> Iterator[object]:
    """The schemas of the properties that an object must have."""
    properties = schema.get("properties")
    others = schema.get("additionalProperties", True)
    for name in _list(schema.get("required")):
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        elif not schema.get("patternProperties"):
            yield others


def _first_items(schema: Schema) -> Iterator[object]:
    """The schemas of the items that an array must have."""
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return
    items = schema.get("items", True)
    first = _list(schema.get("prefixItems")) or _list(items)
    yield from first[:least]
    if least > len(first) and not isinstance(items, list):
        yield items


def target(root: Schema, reference: str) -> object:
    """What a reference within the document points at; True (anything) for others, which are found later."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return True
    value: object = root
    for step in unquote(reference[2:]).split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return True
    return value


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
