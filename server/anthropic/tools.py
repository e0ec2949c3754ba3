"""Anthropic's tools and choice of tools as chat has them."""

from __future__ import annotations

import json

from chairlift.server.errors import invalid, shorten, unsupported
from chairlift.server.wire.messages import CountTokensRequest, CustomTool, ToolChoice, TypedTool

SERVER_TOOLS = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "advisor_",
    "mcp_toolset",
)
"""How the types of tools begin that the server itself would run. This one runs none."""


def tools_of(wire: CountTokensRequest, places: dict[str, str]) -> dict[str, object]:
    """`tools`, `tool_choice` and `parallel_tool_calls`; adds to `places` where each tool stood.

    A tool that the server would run is left out, so that a client which offers it beside its own goes on, and
    refused where it is all that is asked for.

    Raises:
        APIError: 400.
    """
    tools: list[dict[str, object]] = []
    left_out: dict[str | None, str] = {}
    for index, tool in enumerate(wire.tools or ()):
        place = f"tools[{index}]"
        if isinstance(tool, TypedTool):
            if not tool.type.startswith(SERVER_TOOLS):
                raise unsupported(
                    f"{place}.type",
                    f"{place} is of the type {shorten(tool.type)}, whose schema this server does not know; "
                    "describe the tool with an input_schema.",
                )
            left_out[tool.name] = place
            continue
        at = f"tools[{len(tools)}]"
        places[at] = places[f"{at}.function"] = place
        places[f"{at}.function.parameters"] = f"{place}.input_schema"
        tools.append(_function(tool))
    choice = wire.tool_choice
    if left_out and (not tools or (choice is not None and choice.type == "tool" and choice.name in left_out)):
        place = next(iter(left_out.values())) if not tools else left_out[choice.name if choice else None]
        raise unsupported(f"{place}.type", f"{place} would be run by the server, and this one runs no tools.")
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise invalid("tool_choice needs tools to choose from.", "tool_choice", "invalid_value")
        return {}
    return {"tools": tools, **_choice(choice)}


def _function(tool: CustomTool) -> dict[str, object]:
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = "\n\n".join(filter(None, (description, f"Examples of its input:\n{examples}")))
    function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
    if description is not None:
        function["description"] = description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> dict[str, object]:
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise invalid(
            "Missing required parameter: tool_choice.name.", "tool_choice.name", "missing_required_parameter"
        )
    if choice.type != "tool" and choice.name is not None:
        raise invalid(
            f"tool_choice.name is not for a choice of the type {choice.type}.",
            "tool_choice.name",
            "invalid_value",
        )
    chosen: dict[str, object] = {}
    if choice.type == "tool":
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen
