"""A URL's query, read strictly: what is not known is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from chairlift.server.errors import APIError, invalid, shorten, unsupported


class Query:
    """Args: names: the parameters there are. Raises: APIError: 400 for another one."""

    def __init__(self, http: Request, *names: str) -> None:
        self._values = http.query_params
        for name in self._values:
            if name.removesuffix("[]") not in names:
                raise unsupported(shorten(name), f"Unknown parameter: {shorten(name)}.")

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
