"""From `response_format`, `structured_outputs` and `guided_…` to what the answer must follow."""

from __future__ import annotations

import json
from collections.abc import Iterator

from chairlift.engine.constraints import Compiler, Constraint, check
from chairlift.engine.constraints.pieces import Either, Json, Lark, Literal, Piece, Regex
from chairlift.engine.errors import InvalidParameter
from chairlift.engine.output.constrained import answer_piece
from chairlift.engine.output.formats import OutputFormat
from chairlift.server.errors import APIError, invalid, unsupported
from chairlift.server.tools import Offer, blame
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.structured import JSONObjectFormat, JSONSchemaFormat, Structured, TextFormat

MAX_CHOICE_CHARACTERS = 64 * 2**10
"""Of all choices together."""
ANY_OBJECT = '{"type": "object"}'
Asked = tuple[str, Piece]
"""(the parameter, what the answer's content must be)."""


def content_of(wire: Structured, ignore_eos: bool | None) -> Asked | None:
    """Raises: APIError: 400, for more than one, or for what does not go with it."""
    asked = list(_asked(wire))
    if len(asked) > 1:
        (first, _), (second, _) = asked[:2]
        raise invalid(
            f"{first} and {second} both say what the answer must follow; send one of them.",
            second,
            "invalid_value",
        )
    if asked and ignore_eos:
        raise unsupported("ignore_eos", f"ignore_eos is not supported together with {asked[0][0]}.")
    return asked[0] if asked else None


def answer_constraint(
    wire: ChatRequest,
    content: Asked | None,
    offer: Offer,
    output: OutputFormat,
    compiler: Compiler | None,
    *,
    thinks: bool,
    begins: bool,
) -> Constraint | None:
    """What a chat's whole answer must follow: its content, its calls.

    Args:
        thinks: its prompt has opened the thinking.
        begins: it may open it itself.

    Raises:
        APIError: 400, naming the parameter.
    """
    calls = offer.calls
    if calls.strict and not (calls.forced or output.writing is not None or output.harmony):
        index = next(i for i, tool in enumerate(wire.tools or ()) if tool.function.name in offer.strict)
        param = f"tools[{index}].function.strict"
        message = f"{param} is not supported with this model's form of calls, unless the call is forced."
        raise unsupported(param, message)
    try:
        piece = answer_piece(
            output, thinks=thinks, begins=begins, content=content and content[1], calls=calls
        )
    except InvalidParameter as error:
        raise invalid(error.message, error.param, "invalid_value") from None
    constraint: Constraint | None = None
    if piece is not None:
        param = content[0] if content else "tool_choice" if calls.forced else "tools"
        try:
            constraint = constraint_of((param, piece), compiler)
        except APIError:
            if compiler is not None and calls.bound:
                blame(offer, wire, compiler)
            raise
    return constraint


def constraint_of(asked: Asked, compiler: Compiler | None) -> Constraint:
    """Checked and compiled, which takes time of the processor.

    Raises:
        APIError: 400, naming the parameter.
    """
    param, piece = asked
    if compiler is None:
        raise unsupported(param)
    try:
        return compiler.compile(piece, param)
    except InvalidParameter as error:
        raise invalid(error.message, param, "invalid_value") from None


def check_content(asked: Asked) -> None:
    """What of it can be refused before there is a model. Raises: APIError: 400, naming the parameter."""
    param, piece = asked
    try:
        check(piece, param)
    except InvalidParameter as error:
        raise invalid(error.message, param, "invalid_value") from None


def _asked(wire: Structured) -> Iterator[Asked]:
    match wire.response_format:
        case JSONObjectFormat():
            yield "response_format", Json(ANY_OBJECT)
        case JSONSchemaFormat(json_schema=schema):
            content = {} if schema.schema_ is None else schema.schema_
            yield "response_format.json_schema.schema", Json(json.dumps(content), strict=bool(schema.strict))
        case TextFormat() | None:
            pass
    if (outputs := wire.structured_outputs) is not None:
        param, compact = "structured_outputs", bool(outputs.disable_any_whitespace)
        found = list(_forms(param, outputs.json_, outputs.regex, outputs.choice, outputs.grammar, compact))
        if outputs.json_object:
            found.append((f"{param}.json_object", Json(ANY_OBJECT, compact=compact)))
        if not found:
            raise invalid(
                f"{param} must hold one of json, regex, choice, grammar and json_object.",
                param,
                "invalid_value",
            )
        yield from found
    forms = _forms("guided", wire.guided_json, wire.guided_regex, wire.guided_choice, wire.guided_grammar)
    yield from ((param.replace(".", "_", 1), piece) for param, piece in forms)


def _forms(
    param: str,
    schema: str | dict[str, object] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    compact: bool = False,
) -> Iterator[Asked]:
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        yield f"{param}.json", Json(text, strict=True, compact=compact)
    if regex is not None:
        yield f"{param}.regex", Regex(regex)
    if choice is not None:
        size = sum(map(len, choice))
        if size > MAX_CHOICE_CHARACTERS:
            where = f"{param}.choice"
            raise invalid(
                f"{where} has {size} characters; at most {MAX_CHOICE_CHARACTERS}.", where, "invalid_value"
            )
        yield f"{param}.choice", Either(tuple(Literal(text, plain=True) for text in choice))
    if grammar is not None:
        yield f"{param}.grammar", Lark(grammar)
