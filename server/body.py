"""A request's body: bytes, then JSON, then a wire model. What is wrong with it is a 4xx naming the place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from chairlift.server.context import Context, context_of
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, invalid, shorten, unsupported
from chairlift.server.models.model import Use
from chairlift.server.observe.record import note_body
from chairlift.server.wire.base import TAG, Wire
from chairlift.server.wire.parameters import Surface

W = TypeVar("W", bound=Wire)

LONG_BODY = 2**16
"""Bytes beyond which a body is not looked at on the event loop."""

JSON_TYPES = (
    "",
    "application/json",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    "text/json",
    "text/plain",
)


Check = Callable[[bytes, Context], Awaitable[object]]
"""What is wrong with a body whoever loads its model, which is not loaded: of the context only the settings
and the model's defaults are there. What comes of it is not used. Raises: APIError with 4xx."""


async def receive(
    http: Request, use: Use = Use.GENERATION, check: Check | None = None
) -> tuple[Context, bytes]:
    """What every route with a body begins with: the context of the model that it names, loaded, and the body.

    Args:
        use: what the route needs a model for.
        check: asked before a model is loaded for the request.

    Raises:
        EngineStopped: nothing is admitted.
        APIError: see `check_form`, `read_body`, `model_named`, `check` and `Context.about`.
    """
    context = context_of(http)
    context.admit()
    check_form(http)
    settings = context.settings
    raw = await read_body(http, settings.max_body_bytes, settings.body_patience_s)
    if len(raw) < LONG_BODY:
        name = model_named(raw, settings.max_json_depth)
    else:
        name = await asyncio.to_thread(model_named, raw, settings.max_json_depth)
    checking = None if check is None else partial(check, raw)
    return await context.about(http, name, use, checking), raw


def in_a_thread(check: Callable[[bytes, Context], object]) -> Check:
    async def checking(raw: bytes, context: Context) -> None:
        await asyncio.to_thread(check, raw, context)

    return checking


def model_named(raw: bytes, max_depth: int) -> str | None:
    """The model that a body asks for; None where it names none, or nothing that could be one.

    Raises: APIError: 400: the body is no JSON."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        body = read_object(raw, max_depth)  # says what is wrong, or knows better
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None


LEAST_RATE = 1024
"""Bytes a second that a body must come at on the average, once the patience with it has passed."""


def check_form(request: Request) -> None:
    """Whether a body may be JSON, as far as its headers tell. `curl -d` says that it sends a form, some say
    nothing, or `text/plain`: their bodies are read.

    Raises:
        APIError: 415 for a body that is packed, or is said to be something else.
    """
    packed = request.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        raise APIError(
            415,
            f"Content-Encoding {shorten(packed)!r} is not supported: send the body as it is.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity", "Connection": "close"},
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise APIError(
            415,
            f"Content-Type {shorten(kind)!r} is not supported: send application/json.",
            code="unsupported_media_type",
            headers={"Accept": "application/json", "Connection": "close"},
        )


async def read_body(request: Request, limit: int, patience_s: float) -> bytes:
    """The whole body, counted as it comes: a `content-length` may be missing or wrong.

    Raises:
        APIError: 413 as soon as more than `limit` bytes are announced or have come; 408 when nothing comes
            for `patience_s` seconds, or, after these, less than `LEAST_RATE`.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(patience_s) as deadline:
            started = now()
            async for chunk in request.stream():
                size += len(chunk)
                deadline.reschedule(patience_s + min(now(), started + size / LEAST_RATE))
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise APIError(
            408,
            f"The request body did not go on for {patience_s:g} seconds, or comes too slowly.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise APIError(CLIENT_CLOSED_REQUEST, "The client left.") from None
    body = b"".join(chunks)
    note_body(body)
    return body


def _too_large(limit: int) -> APIError:
    return APIError(
        413,
        f"The request body is longer than {limit} bytes.",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def parse(raw: bytes, wire: type[W], surface: Surface, max_depth: int) -> W:
    """The wire model in `raw`; parameters of `surface` that ask for nothing are left out.

    Raises:
        APIError: 400, with the first offending field in `param`.
    """
    return fit(read_object(raw, max_depth), wire, surface)


def read_object(raw: bytes, max_depth: int) -> dict[str, object]:
    """The JSON object in `raw`. Raises: APIError: 400."""
    value = _parse_json(raw)
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    check_json(value, max_depth)
    return value


def fit(value: Mapping[str, object], wire: type[W], surface: Surface) -> W:
    """The wire model of an object that `check_json` has passed; see `parse`."""
    fields = wire.model_fields
    given: dict[str, object] = {}
    for name, content in value.items():
        if surface.is_neutral(name, content):
            continue
        if name not in fields:
            known = surface.is_known(name)
            raise unsupported(
                shorten(name),
                f"This value of {name} is not supported."
                if known
                else f"Unknown parameter: {shorten(name)}.",
            )
        given[name] = content
    try:
        return wire.model_validate(given)
    except ValidationError as error:
        raise explain(error) from None


def _parse_json(raw: bytes) -> object:
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise invalid("The request body is not valid UTF-8.", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise invalid(
            f"The request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:
        # Python's own limit on the digits of an integer, or a constant that JSON does not have.
        message = str(error) if isinstance(error, _Constant) else "a number has too many digits."
        raise invalid(f"The request body is not valid JSON: {message}", code="invalid_json") from None


class _Constant(ValueError):
    pass


def _refuse_constant(name: str) -> object:
    raise _Constant(f"{name} is not a JSON number.")


def check_json(value: object, max_depth: int) -> None:
    r"""Refuse nesting that code further on would recurse into, and lone surrogates (`"\ud800"` is legal JSON,
    but no character: it cannot be tokenized, logged or sent back).

    Raises:
        APIError: 400.
    """
    waiting: list[tuple[object, tuple[str | int, ...]]] = [(value, ())]
    while waiting:
        item, path = waiting.pop()
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, dict | list):
            if len(path) >= max_depth:
                raise invalid(
                    f"The request body is nested more than {max_depth} deep.",
                    param_path(path),
                    "invalid_json",
                )
            if isinstance(item, dict):
                for name, content in item.items():
                    _check_text(name, path)
                    waiting.append((content, (*path, name)))
            else:
                waiting.extend(
                    (content, (*path, index))
                    for index, content in enumerate(item)
                    if isinstance(content, str | dict | list)
                )


def _check_text(text: str, path: tuple[str | int, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise invalid(
            f"A lone surrogate ({surrogate}) is not a character.", param_path(path) or None, "invalid_value"
        ) from None


def param_path(location: Sequence[str | int]) -> str:
    """`messages[0].content`, as OpenAI spells a place."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(TAG):
            path += f".{step}" if path else step
    return shorten(path)


def explain(error: ValidationError) -> APIError:
    """The first complaint of pydantic, in the envelope's words."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = param_path(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return invalid(f"Missing required parameter: {param}.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return unsupported(param, f"Unknown parameter: {param}.")
    if kind == "none_required":
        return unsupported(param, f"{param} is not supported.")
    if kind == "union_tag_invalid":
        if "content" not in param:
            return unsupported(param, f"{_tag(first)} is not supported in {param}.")
        return unsupported(
            param, f"{_tag(first)} parts are not supported in {param}: this server reads text and images."
        )
    if kind == "union_tag_not_found":
        return invalid(
            f"Invalid value for {param}: an object with a type is expected.", param, "invalid_type"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return invalid(f"Invalid value for {param}: {first['msg']}.", param, code)


def _tag(error: ErrorDetails) -> str:
    return shorten(str(error.get("ctx", {}).get("tag", "")).strip("<>"))
