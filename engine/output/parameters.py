"""Arguments in XML: a parameter is text between two marks, and its schema says what the text stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chairlift.engine.constraints.pieces import Json, Literal, Piece, Until, either, optional
from chairlift.engine.constraints.pieces import Sequence as Chain
from chairlift.engine.constraints.schema import Schema, target
from chairlift.engine.errors import InvalidParameter

KEY = "\2"
"""Stands for the parameter's name."""
UNENFORCED = ("pattern", "format", "minLength", "maxLength")
"""Of strings, which are free text up to their end mark."""


@dataclass(frozen=True, slots=True)
class ParameterWriting:
    """A parameter is `before`, its value, `after`."""

    before: str
    after: str

    def parameters(self, schema: Schema, *, strict: bool) -> Piece:
        """All parameters of a call, in their schema's order, those that are not required maybe.

        Raises:
            InvalidParameter: `strict` asks for what cannot be enforced.
        """
        properties, required = schema.get("properties"), schema.get("required")
        pieces: list[Piece] = []
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            piece = self._parameter(str(name), value, schema, strict=strict)
            needed = isinstance(required, Sequence) and name in required
            pieces.append(piece if needed else optional(piece))
        return Chain(tuple(pieces))

    def _parameter(self, name: str, value: object, root: Schema, *, strict: bool) -> Piece:
        before = Literal(self.before.replace(KEY, name))
        schema = value if isinstance(value, Mapping) else {}
        if choices := _choices(schema):
            texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
            values = [Literal(text, plain=True) for text in texts]
            return Chain((before, either(values), Literal(self.after)))
        types = types_of(schema, root)
        if "string" in types or not types:
            if strict and (keyword := next((word for word in UNENFORCED if word in schema), None)):
                raise InvalidParameter("tools", f"tools: {keyword} of {name} cannot be enforced strictly.")
            return Chain((before, Until(self.after)))
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return Chain((before, Json(json.dumps({**schema, **definitions}), strict), Literal(self.after)))


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """JSON's types that a value may have; empty where the schema does not tell."""
    types: set[str] = set()
    waiting: list[object] = [schema]
    seen: set[int] = set()  # recursive schemas refer to themselves, and more than once
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        kind = part.get("type")
        types.update([kind] if isinstance(kind, str) else map(str, kind) if isinstance(kind, list) else ())
        if kind is None:
            types.update(map(_type_of, _choices(part)))
        for word in ("anyOf", "oneOf", "allOf"):
            waiting += parts if isinstance(parts := part.get(word), list) else ()
        if isinstance(reference := part.get("$ref"), str):
            waiting.append(target(root, reference))
    return frozenset(types)


def _choices(schema: Schema) -> list[object]:
    """The values that it names; none where it names none."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return choices if isinstance(choices, list) else []


def _type_of(value: object) -> str:
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def with_types(arguments: dict[str, object], parameters: object) -> dict[str, object]:
    """Text that its schema says is no text, as the JSON that it is: parsers look at a value's own `type`,
    and not at references and alternatives."""
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties"), Mapping):
        return arguments
    properties = parameters["properties"]
    return {
        name: _typed(value, properties[name], parameters) if name in properties else value
        for name, value in arguments.items()
    }


def _typed(value: object, schema: object, root: Schema) -> object:
    if not isinstance(value, str) or not isinstance(schema, Mapping):
        return value
    types = types_of(schema, root)
    if not types or "string" in types:
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    number = {"number"} if _type_of(found) == "integer" else set()
    return found if types & {_type_of(found), *number} else value
