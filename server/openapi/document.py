"""`/openapi.json`: the API described, made from the wire models that read the bodies, not by hand."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from chairlift.server.openapi.answers import AnthropicError, Error
from chairlift.server.openapi.operations import OPERATIONS, Operation
from chairlift.server.security.gate import HEALTH
from chairlift.server.wire.parameters import COMPLETIONS, Surface

Schema = dict[str, Any]
_REF = "#/components/schemas/{model}"

SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
GUARDS = (401, 403, 429)
"""What keys, names and too many requests are refused with, before an endpoint."""

BOUNDS: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "xtc_probability": {"minimum": 0, "maximum": 1},
    "xtc_threshold": {"minimum": 0, "maximum": 0.5},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "n": {"minimum": 1, "maximum": 128},
}
"""What is checked behind the wire models, of numbers of the body itself."""
ECHO_ALONE: dict[str, Schema] = {**BOUNDS, "max_tokens": {"minimum": 0}}
"""The same of completions, which may echo their prompt and no more."""


def openapi(title: str, version: str) -> Schema:
    """Takes half a second."""
    listed: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in _models()]
    references, definitions = models_json_schema(listed, ref_template=_REF)
    schemas: Schema = definitions["$defs"]
    names = {model: references[model, mode]["$ref"].rpartition("/")[2] for model, mode in listed}
    plain = dict(schemas)
    bodies: dict[str, str] = {}
    """Names of the components: one model may be read with other parameters beside it."""
    for operation in OPERATIONS:
        if operation.body is not None:
            name, accepted = names[operation.body], _accepted(plain[names[operation.body]], operation.surface)
            if name in bodies.values() and schemas[name] != accepted:
                name += "".join(map(str.capitalize, re.findall(r"[a-z]+", operation.path.rpartition("/")[2])))
            bodies[operation.path], schemas[name] = name, accepted
    paths: Schema = {}
    for operation in OPERATIONS:
        described = _operation(operation, names)
        if operation.body is not None:
            content = {"application/json": {"schema": _ref(bodies[operation.path])}}
            described["requestBody"] = {"required": True, "content": content}
        paths.setdefault(operation.path, {})[operation.method] = described
    document = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
        "security": [{}, *({name: []} for name in SCHEMES)],
    }
    # Two models of one name are told apart by their modules, of which the last word is enough.
    named: Schema = json.loads(re.sub(r"chairlift__\w+?__(\w+?)__(\w+)", _name, json.dumps(document)))
    return named


def _name(match: re.Match[str]) -> str:
    modules, _, model = match[0].rpartition("__")
    return modules.rpartition("__")[2].capitalize() + model


def _models() -> list[type[BaseModel]]:
    found: dict[type[BaseModel], None] = {Error: None, AnthropicError: None}
    for operation in OPERATIONS:
        bodies = [] if operation.body is None else [operation.body]
        unready = [] if operation.unready is None else [operation.unready]
        found.update(dict.fromkeys((*operation.answers, *operation.events, *bodies, *unready)))
    return list(found)


def _accepted(schema: Schema, surface: Surface | None) -> Schema:
    """With bounds, and with the parameters that are accepted only at values that ask for nothing."""
    bounds = ECHO_ALONE if surface is COMPLETIONS else BOUNDS
    properties = {
        name: _bounded(field, bounds[name]) if name in bounds else field
        for name, field in schema["properties"].items()
    }
    for name, values in (surface.neutral if surface is not None else {}).items():
        if name not in properties:
            properties[name] = {
                "enum": [None, *values],
                "description": "Not supported; these values ask for nothing.",
            }
    return {**schema, "properties": properties}


def _bounded(field: Schema, bounds: Schema) -> Schema:
    kinds = field.get("anyOf", [field])
    bounded = [{**kind, **bounds} if kind.get("type") in ("number", "integer") else kind for kind in kinds]
    return {**field, "anyOf": bounded} if "anyOf" in field else bounded[0]


def _operation(operation: Operation, names: dict[type[BaseModel], str]) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}_{operation.path.strip('/')}").strip("_"),
        "responses": _responses(operation, names),
    }
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    for query in operation.query:
        told = {"description": query.description} if query.description else {}
        parameters.append(
            {"name": query.name, "in": "query", "required": False, "schema": query.schema, **told}
        )
    if parameters:
        described["parameters"] = parameters
    return described


def _responses(operation: Operation, names: dict[type[BaseModel], str]) -> Schema:
    content: Schema = {}
    if operation.answers:
        content["application/json"] = {"schema": _any(operation.answers, names)}
    if operation.text is not None:
        content[operation.text] = {"schema": {"type": "string"}}
    if operation.stream is not None:
        events: Schema = {"type": "string", "description": operation.stream}
        if operation.events:
            events["x-event-data"] = _any(operation.events, names)
        content["text/event-stream"] = {"schema": events}
    responses: Schema = {"200": {"description": "OK", "content": content}}
    error = names[AnthropicError if operation.anthropic else Error]
    guards = () if operation.path in HEALTH else GUARDS
    for status in sorted({*operation.errors, *guards}):
        responses[str(status)] = _refusal(status, _ref(error))
    if operation.unready is not None:
        responses["503"] = _refusal(503, _ref(names[operation.unready]))
    return responses


def _refusal(status: int, schema: Schema) -> Schema:
    phrase = "Overloaded" if status == 529 else HTTPStatus(status).phrase
    return {"description": phrase, "content": {"application/json": {"schema": schema}}}


def _any(models: tuple[type[BaseModel], ...], names: dict[type[BaseModel], str]) -> Schema:
    references = [_ref(names[model]) for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}
