"""A URL's query, read strictly: what its endpoint does not know is refused by name, on every route."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import MappingProxyType

from fastapi import Request

from chairlift.server.errors import APIError, invalid, shorten, unsupported
from chairlift.server.openapi.operations import OPERATIONS

EVERYWHERE = frozenset({"beta"})
"""Anthropic's clients say `?beta=true` on any path. It changes nothing."""


@cache
def _known() -> MappingProxyType[tuple[str, str], frozenset[str]]:
    """Names of the parameters, by method and path."""
    return MappingProxyType(
        {
            (operation.method, operation.path): frozenset(query.name for query in operation.query)
            for operation in OPERATIONS
        }
    )


async def check_query(http: Request) -> None:
    """Asked before every route. Raises: APIError: 400 for a parameter that its description does not have."""
    if not http.url.query:
        return
    method = "get" if http.method == "HEAD" else http.method.lower()
    path = http.scope["route"].path.replace(":path}", "}")
    known = _known().get((method, path), frozenset()) | EVERYWHERE
    for name in http.query_params:
        if name.removesuffix("[]") not in known:
            raise unsupported(shorten(name), f"Unknown parameter: {shorten(name)}.")


class Query:
    """The values of what `check_query` has let pass."""

    def __init__(self, http: Request) -> None:
        self._values = http.query_params

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def boolean(self, name: str) -> bool:
        return self.one_of(name, ("true", "false")) == "true"

    def integer(self, name: str, *, least: int, most: int = 2**31 - 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 10) or not least <= int(text) <= most:
            raise self.refused(name, f"must be an integer from {least} to {most}")
        return int(text)

    def one_of(self, name: str, values: Sequence[str]) -> str | None:
        text = self.text(name)
        if text is not None and text not in values:
            raise self.refused(name, f"must be one of {', '.join(values)}")
        return text

    def check_list(self, name: str, values: Sequence[str]) -> None:
        """Of what may be given more than once, as `name` or `name[]`."""
        given = {*self._values.getlist(name), *self._values.getlist(f"{name}[]")}
        if not given <= set(values):
            raise self.refused(name, f"must be one of {', '.join(values)}")

    def refused(self, name: str, why: str) -> APIError:
        return invalid(f"{name} {why}.", name, "invalid_value")
