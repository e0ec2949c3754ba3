"""How calls are to be written, where an answer must be one: the pieces of a constraint.

The inverse of `tool_formats`, for the formats whose arguments are JSON or XML. Calls of a family that writes
them otherwise are forced in Hermes' form, and read in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from chairlift.engine.constraints.pieces import Json, Literal, Piece, Regex, Repeat, Until, either
from chairlift.engine.constraints.pieces import Sequence as Chain
from chairlift.engine.output.grammar import Tool
from chairlift.engine.output.parameters import KEY, ParameterWriting

NAME = "\0"
"""Stands for the tool's name."""
NUMBER = "\1"
"""Stands for a number of one digit."""
FREE = "free"
"""A member of functions whose arguments need not follow their schema."""
ANY_OBJECT = '{"type": "object"}'
NO_ARGUMENTS: Mapping[str, object] = MappingProxyType(
    {"type": "object", "properties": {}, "additionalProperties": False}
)


@dataclass(frozen=True, slots=True)
class Writing:
    """`opening`, calls with `between` two of them, `closing`; a call is `before`, its arguments, `after`."""

    before: str
    after: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    mark: str = ""
    """With which `opening`, or each call where there is none, begins: no other text may hold it. Empty where
    calls have none."""
    parameters: ParameterWriting | None = None
    """How arguments are written that are no JSON."""

    def call(self, tool: Tool, *, behind: str = "") -> Piece:
        """`behind`: what of the beginning is written already."""
        function = tool["function"]
        assert isinstance(function, Mapping)
        before = self.before.replace(NAME, str(function["name"])).removeprefix(behind)
        head, number, tail = before.partition(NUMBER)
        named = (Literal(head), Regex("[0-9]"), Literal(tail)) if number else (Literal(before),)
        return Chain((*named, *self._arguments(function)))

    def _arguments(self, function: Mapping[str, object]) -> tuple[Piece, ...]:
        """The arguments and what stands behind them."""
        schema, free = schema_of(function.get("parameters")), FREE in function
        strict = bool(function.get("strict"))
        if self.parameters is None:
            return Json(ANY_OBJECT if free else json.dumps(schema), strict), Literal(self.after)
        if free:
            return (Until(self.after),)
        return self.parameters.parameters(schema, strict=strict), Literal(self.after)

    def calls(self, tools: Sequence[Tool], *, parallel: bool) -> Piece:
        """One call or several, of these tools."""
        between = Literal(self.between) if self.between else None
        call = either(map(self.call, tools))
        several = Repeat(call, 1, None, between) if parallel else call
        return Chain((Literal(self.opening), several, Literal(self.closing)))

    def rest(self, tools: Sequence[Tool], *, parallel: bool) -> Piece:
        """What follows the mark: the rest of one call, or of several that share it."""
        if not self.opening:
            return either(self.call(tool, behind=self.mark) for tool in tools)
        behind = self.opening.removeprefix(self.mark)
        return replace(self, opening=behind).calls(tools, parallel=parallel)


_SAYING_NOTHING = frozenset({"type", "properties", "required", "title", "description", "$schema"})
"""Members of a schema that allow nothing in particular, if there are no properties."""


def schema_of(parameters: object) -> dict[str, object]:
    """The schema of a tool's arguments: an object, without members where there are no parameters."""
    if not isinstance(parameters, Mapping) or not (
        parameters.get("properties") or parameters.keys() - _SAYING_NOTHING
    ):
        return dict(NO_ARGUMENTS)
    return {"type": "object", **parameters}


def _listed(start: str, end: str = "", *, name: str = "name", arguments: str = "arguments") -> Writing:
    return Writing(f'{{"{name}": "{NAME}", "{arguments}": ', "}", f"{start}[", ", ", f"]{end}", start)


HERMES_WRITING = Writing(
    f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", between="\n", mark="<tool_call>"
)
HARMONY_WRITING = Writing(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


def writing_of(format: str, template: str) -> Writing | None:
    """How a family writes its calls; None where their arguments are neither JSON nor XML.

    Args:
        template: the chat template, which tells versions of a format apart.
    """
    if format == "mistral":
        if "[ARGS]" in template:
            return Writing(f"[TOOL_CALLS]{NAME}[ARGS]", mark="[TOOL_CALLS]")
        return _listed("[TOOL_CALLS]")
    if format == "deepseek_v3":
        section, call, end, section_end = _DEEPSEEK
        if "```json" in template:
            return Writing(
                f"{call}function<｜tool▁sep｜>{NAME}\n```json\n",
                f"\n```{end}",
                section,
                "\n",
                section_end,
                section,
            )
        return Writing(f"{call}{NAME}<｜tool▁sep｜>", end, section, "", section_end, section)
    if format == "glm":
        line = "" if "</arg_key><arg_value>" in template else "\n"
        parameter = ParameterWriting(f"<arg_key>{KEY}</arg_key>{line}<arg_value>", f"</arg_value>{line}")
        return Writing(
            f"<tool_call>{NAME}{line}",
            "</tool_call>",
            between="\n",
            mark="<tool_call>",
            parameters=parameter,
        )
    return _WRITINGS.get(format)


_WRITINGS: Mapping[str, Writing] = MappingProxyType(
    {
        "hermes": HERMES_WRITING,
        "llama3_json": Writing(f'{{"name": "{NAME}", "parameters": ', "}", between="; "),
        "kimi_k2": Writing(
            f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "",
            "<|tool_calls_section_end|>",
            "<|tool_calls_section_begin|>",
        ),
        "granite": _listed("<|tool_call|>"),
        "phi4": _listed("<|tool_call|>", "<|/tool_call|>"),
        "jamba": _listed("<tool_calls>", "</tool_calls>"),
        "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>"),
        "internlm": Writing(
            f'<|action_start|><|plugin|>{{"name": "{NAME}", "parameters": ',
            "}<|action_end|>",
            mark="<|action_start|><|plugin|>",
        ),
        "qwen3_coder": Writing(
            f"<tool_call>\n<function={NAME}>\n",
            "</function>\n</tool_call>",
            between="\n",
            mark="<tool_call>",
            parameters=ParameterWriting(f"<parameter={KEY}>\n", "\n</parameter>\n"),
        ),
        "seed_oss": Writing(
            f"<seed:tool_call>\n<function={NAME}>\n",
            "</function>\n</seed:tool_call>",
            between="\n",
            mark="<seed:tool_call>",
            parameters=ParameterWriting(f"<parameter={KEY}>", "</parameter>\n"),
        ),
        "minimax_m2": Writing(
            f'<invoke name="{NAME}">\n',
            "</invoke>\n",
            "<minimax:tool_call>\n",
            "",
            "</minimax:tool_call>",
            "<minimax:tool_call>",
            ParameterWriting(f'<parameter name="{KEY}">', "</parameter>\n"),
        ),
        "cohere": _listed("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"),
    }
)
