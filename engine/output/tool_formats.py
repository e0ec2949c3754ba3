"""How model families write tool calls, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import regex

from chairlift.engine.output.grammar import ToolFormat
from chairlift.engine.output.json_calls import HeaderCalls, ObjectCalls
from chairlift.engine.output.other_calls import (
    dsml_calls,
    function_gemma_calls,
    glm_calls,
    line_calls,
    pythonic_calls,
)
from chairlift.engine.output.whole_calls import UpstreamCalls, WholeCalls

HERMES = "hermes"
HARMONY = "openai"

_HEADER = r"\s*(?:functions\.)?(?P<name>[\w.\-]+?)"
_GLM = r"\s*[\w.\-]+\s*(?:<arg_key>|</tool_call>)|\s*\{"
_function_calls = UpstreamCalls("qwen3_coder", regex.compile(r"(?<=</function>)\s*(?=<function=)"))

_FORMATS: dict[str, ToolFormat] = {
    HERMES: ObjectCalls(("<tool_call>",), "</tool_call>"),
    "llama3_json": ObjectCalls(("<|python_tag|>",), bare=True, known=True),
    "mistral": HeaderCalls(
        ("", ""),
        "[TOOL_CALLS]",
        re.compile(_HEADER + r"\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"),
        objects=ObjectCalls(("[TOOL_CALLS]",)),
    ),
    "kimi_k2": HeaderCalls(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "<|tool_call_begin|>",
        re.compile(_HEADER + r"(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"),
        "<|tool_call_end|>",
    ),
    "deepseek_v3": HeaderCalls(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        "<｜tool▁call▁begin｜>",
        re.compile(
            r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.\-]+)(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?\s*)?"
        ),
        "<｜tool▁call▁end｜>",
    ),
    "granite": ObjectCalls(("<|tool_call|>",)),
    "phi4": ObjectCalls(("<|tool_call|>",), "<|/tool_call|>"),
    "jamba": ObjectCalls(("<tool_calls>",), "</tool_calls>"),
    "nemotron": ObjectCalls(("<TOOLCALL>",), "</TOOLCALL>"),
    "internlm": ObjectCalls(("<|action_start|><|plugin|>",), "<|action_end|>"),
    "cohere": ObjectCalls(("<|START_ACTION|>",), "<|END_ACTION|>"),
    "qwen3_coder": WholeCalls(
        (("<tool_call>", "</tool_call>"),),
        regex.compile(r"\s*<function="),
        _function_calls,
    ),
    "seed_oss": WholeCalls(
        (("<seed:tool_call>", "</seed:tool_call>"),),
        regex.compile(r"\s*<function="),
        _function_calls,
    ),
    "glm": WholeCalls((("<tool_call>", "</tool_call>"),), regex.compile(_GLM), glm_calls),
    "longcat": WholeCalls(
        (("<longcat_tool_call>", "</longcat_tool_call>"),),
        regex.compile(r"\s*[\w.\-]+\s*<longcat_arg_key>|\s*\{"),
        UpstreamCalls("longcat"),
    ),
    "minimax_m2": WholeCalls(
        (("<minimax:tool_call>", "</minimax:tool_call>"),),
        regex.compile(r"\s*<invoke name="),
        UpstreamCalls("minimax_m2"),
    ),
    "minicpm5": WholeCalls(
        (("<function name=", "</function>"),), regex.compile(r"[\"'\w]"), UpstreamCalls("minicpm5"), keep=True
    ),
    "muse_spark": WholeCalls(
        (("<atem:function_calls>", "</atem:function_calls>"),),
        regex.compile(r"\s*<atem:invoke"),
        UpstreamCalls("muse_spark"),
    ),
    "kimi_k3": WholeCalls(
        (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        regex.compile(r"\s*<\|open\|>call"),
        UpstreamCalls("kimi_k3"),
    ),
    "gemma4": WholeCalls(
        (("<|tool_call>", "<tool_call|>"),), regex.compile(r"\s*call:"), UpstreamCalls("gemma4")
    ),
    "function_gemma": WholeCalls(
        (("<start_function_call>", "<end_function_call>"),), regex.compile(r"\s*call:"), function_gemma_calls
    ),
    "lfm2": WholeCalls(
        (("<|tool_call_start|>", "<|tool_call_end|>"),), regex.compile(r"\s*\["), UpstreamCalls("pythonic")
    ),
    "pythonic": WholeCalls(
        (("<|python_start|>", "<|python_end|>"),), regex.compile(r"\[\s*[\w.]+\("), pythonic_calls, bare=True
    ),
    "olmo3": WholeCalls(
        (("<function_calls>", "</function_calls>"),), regex.compile(r"\s*[\w.]+\("), line_calls
    ),
    "deepseek_v32": WholeCalls(
        (
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
        regex.compile(r"\s*<｜DSML｜invoke"),
        dsml_calls,
    ),
}
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(_FORMATS)

INNER_MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hermes": ("</tool_call>",),
        "mistral": ("[CALL_ID]", "[ARGS]"),
        "kimi_k2": ("<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        "deepseek_v3": ("<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "phi4": ("<|/tool_call|>",),
        "jamba": ("</tool_calls>",),
        "nemotron": ("</TOOLCALL>",),
        "internlm": ("<|action_end|>",),
        "cohere": ("<|END_ACTION|>",),
        "qwen3_coder": ("</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
        "seed_oss": ("</seed:tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
        "glm": ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "longcat": (
            "</longcat_tool_call>",
            "<longcat_arg_key>",
            "</longcat_arg_key>",
            "<longcat_arg_value>",
            "</longcat_arg_value>",
        ),
        "minimax_m2": (
            "</minimax:tool_call>",
            "<invoke name=",
            "</invoke>",
            "<parameter name=",
            "</parameter>",
        ),
        "minicpm5": ("</function>", "<param name=", "</param>", "<![CDATA[", "]]>"),
        "muse_spark": (
            "</atem:function_calls>",
            "<atem:invoke",
            "</atem:invoke>",
            "<atem:parameter",
            "</atem:parameter>",
        ),
        "kimi_k3": ("<|close|>tools<|sep|>",),
        "gemma4": ("<tool_call|>", '<|"|>'),
        "function_gemma": ("<end_function_call>", "<escape>"),
        "lfm2": ("<|tool_call_end|>",),
        "pythonic": ("<|python_end|>",),
        "olmo3": ("</function_calls>",),
        "deepseek_v32": ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
    }
)
"""Marks beside those that begin calls: where they are special tokens, their text is needed."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "json_tools": HERMES,
        "qwen25": HERMES,
        "granite4": HERMES,
        "llama4_pythonic": "pythonic",
        "glm45": "glm",
        "glm47": "glm",
        "laguna": "glm",
        "hunyuan": "jamba",
        "deepseek_r1": "deepseek_v3",
        "deepseek_v31": "deepseek_v3",
        "phi4_mini_json": "phi4",
        "llama4_json": "llama3_json",
        "functiongemma": "function_gemma",
        "harmony": HARMONY,
        "gpt_oss": HARMONY,
    }
)
"""Other libraries' names of the same formats."""

UPSTREAM_NAMES: Mapping[str, str] = MappingProxyType(
    {"json_tools": HERMES, "pythonic": "lfm2", "glm47": "glm", "laguna": "glm"}
)
"""mlx-lm's names of the formats that have others here."""

TEMPLATE_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm", ("<arg_key>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("muse_spark", ("<atem:function_calls>",)),
    ("deepseek_v32", ("DSML",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("internlm", ("<|action_start|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("phi4", ("<|/tool_call|>",)),
    ("olmo3", ("<function_calls>",)),
    ("jamba", ("<tool_calls>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    (HERMES, ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""What a chat template holds all of, where the family writes calls so. The first that fits counts."""
