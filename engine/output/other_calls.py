"""Formats of whole calls that mlx-lm's parsers do not read as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from chairlift.engine.output.grammar import Tool, Tools
from chairlift.engine.output.whole_calls import Call, UpstreamCalls, checked

_gemma4 = UpstreamCalls("gemma4")
_glm = UpstreamCalls("glm47")
_pythonic = UpstreamCalls("pythonic")

_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>', re.DOTALL
)
_NEXT_LINE_CALL = re.compile(r"\)\s*\n\s*(?=[\w.]+\()")


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return Tools(tools).names


def function_gemma_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Gemma 4's form but for the quotes. mlx-lm's own parser of it ends at the first closing brace, be it in
    a string or of an inner object."""
    return _gemma4(body.replace("<escape>", '<|"|>'), tools)


def glm_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """A name without arguments may be any text between two marks, so it must be a tool's."""
    if "<arg_key>" not in body and not body.lstrip().startswith("{") and body.strip() not in _names(tools):
        raise ValueError("no call")
    return _glm(body, tools)


def pythonic_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """`[f(a=1), g()]` as a whole answer: only of tools there are."""
    calls = _pythonic(body, tools)
    known = _names(tools)
    if not body.rstrip().endswith("]") or any(name not in known for name, _ in calls):
        raise ValueError("no calls")
    return calls


def line_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """OLMo 3: a call a line, in Python's form."""
    return _pythonic("[" + _NEXT_LINE_CALL.sub("), ", body.strip()) + "]", tools)


def dsml_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """DeepSeek V3.2: `string="true"` marks values that are text, the others are JSON."""
    calls = []
    for name, inside in _INVOKE.findall(body):
        arguments: dict[str, object] = {}
        for key, string, value in _PARAMETER.findall(inside):
            arguments[key] = value if string != "false" else _json_or_text(value)
        calls.append({"name": name, "arguments": arguments})
    return checked(calls, tools)


def _json_or_text(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
