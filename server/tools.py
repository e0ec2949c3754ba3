"""What a chat request offers of tools, and whether it forces calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.constraints import Compiler
from chairlift.engine.constraints.pieces import Json
from chairlift.engine.errors import InvalidParameter
from chairlift.engine.output.constrained import Calls
from chairlift.engine.output.writing import schema_of
from chairlift.server.errors import invalid, shorten
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.tools import AllowedTools, NamedTool, Tool


@dataclass(frozen=True, slots=True)
class Offer:
    """Checked: names are unique, and what is chosen is offered."""

    tools: tuple[dict[str, object], ...] = ()
    """As the template gets them, in OpenAI's form. Empty where nothing may be called."""
    forced: bool = False
    """The answer must be a call."""
    allowed: frozenset[str] | None = None
    """Names that may be called; None: all. Where a call is forced, the template sees the others, too."""
    parallel: bool = True
    """More than one call is welcome."""
    strict: frozenset[str] = frozenset()
    """Names of tools whose arguments must follow their schema."""

    @property
    def calls(self) -> Calls:
        """What may be called, for a constraint."""
        tools = tuple(
            {**tool, "function": {**_function(tool), "strict": _function(tool)["name"] in self.strict}}
            for tool in self.callable
        )
        return Calls(tools, self.forced, self.parallel)

    @property
    def callable(self) -> tuple[dict[str, object], ...]:
        """The tools that may be called."""
        if self.allowed is None:
            return self.tools
        return tuple(tool for tool in self.tools if _function(tool)["name"] in self.allowed)


def _function(tool: dict[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def offer_of(wire: ChatRequest) -> Offer:
    """Raises: APIError: 400, for tools and a choice that do not go together."""
    tools, choice = wire.tools or [], wire.tool_choice
    names: set[str] = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        if tool.function.name in names:
            raise invalid(f"{param}.name repeats {tool.function.name!r}.", f"{param}.name", "invalid_value")
        names.add(tool.function.name)
        _check_schema(tool, f"{param}.parameters")
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice needs tools to choose from.", "tool_choice", "invalid_value")
    parallel = wire.parallel_tool_calls is not False
    if choice == "none" or not tools:
        return Offer(parallel=parallel)
    allowed: frozenset[str] | None = None
    forced = choice == "required"
    if isinstance(choice, NamedTool):
        forced = True
        allowed = _chosen([choice], names, "tool_choice.function.name")
    elif isinstance(choice, AllowedTools):
        subset = choice.allowed_tools
        forced = subset.mode == "required"
        allowed = _chosen(subset.tools, names, "tool_choice.allowed_tools.tools")
    if allowed is not None and not forced:
        # Nothing but the prompt keeps the model from calling the others.
        tools = [tool for tool in tools if tool.function.name in allowed]
    return Offer(
        tuple(map(_dumped, tools)),
        forced,
        allowed,
        parallel and not isinstance(choice, NamedTool),
        frozenset(tool.function.name for tool in tools if tool.function.strict),
    )


def blame(offer: Offer, wire: ChatRequest, compiler: Compiler) -> None:
    """Find the tool whose schema cannot be followed, where all of them together cannot.

    Raises:
        APIError: 400, naming it.
    """
    for index, tool in enumerate(wire.tools or ()):
        if not offer.forced and tool.function.name not in offer.strict:
            continue
        param = f"tools[{index}].function.parameters"
        schema = Json(
            json.dumps(schema_of(tool.function.parameters)), strict=tool.function.name in offer.strict
        )
        try:
            compiler.compile(schema, param)
        except InvalidParameter as error:
            raise invalid(error.message, param, "invalid_value") from None


def _chosen(chosen: Sequence[NamedTool], names: set[str], param: str) -> frozenset[str]:
    if not chosen:
        raise invalid(f"{param} must name at least one tool.", param, "invalid_value")
    for tool in chosen:
        if tool.function.name not in names:
            name = shorten(tool.function.name)
            raise invalid(f"{param} names {name!r}, which is not among tools.", param, "invalid_value")
    return frozenset(tool.function.name for tool in chosen)


def _check_schema(tool: Tool, param: str) -> None:
    schema = tool.function.parameters
    if schema and schema.get("type", "object") != "object":
        raise invalid(f"{param} must be the schema of an object.", param, "invalid_value")


def _dumped(tool: Tool) -> dict[str, object]:
    """What templates write out: without what is for the server alone, and never without parameters, which
    some templates rely on."""
    function = tool.function
    said: dict[str, object] = {"name": function.name, "description": function.description or ""}
    said["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": said}
