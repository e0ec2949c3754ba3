"""Which parser reads a model's answers: found from its chat template and special tokens, or named."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from chairlift.engine.errors import InvalidParameter
from chairlift.engine.output.cursor import Cursor, MakeID
from chairlift.engine.output.grammar import Thinking, Tool, ToolFormat, Tools, answer
from chairlift.engine.output.harmony import CHANNEL, MARKS, MESSAGE, START, harmony
from chairlift.engine.output.parser import AnswerParser
from chairlift.engine.output.tool_formats import (
    ALIASES,
    HARMONY,
    HERMES,
    INNER_MARKS,
    TEMPLATE_SIGNS,
    TOOL_FORMATS,
    UPSTREAM_NAMES,
)
from chairlift.engine.output.writing import HERMES_WRITING, Writing, writing_of
from chairlift.engine.plan import Tokenizer

NONE = "none"
"""As a parser's name: nothing is read."""
TAIL = 64
"""Tokens at a prompt's end among which a mark that opens the thinking stands."""

_THINK = Thinking("<think>", "</think>")
THINKING: Mapping[str, Thinking] = MappingProxyType(
    {
        "think": _THINK,
        "mistral": Thinking("[THINK]", "[/THINK]"),
        "gemma4": Thinking("<|channel>thought", "<channel|>"),
        "longcat": Thinking("<longcat_think>", "</longcat_think>"),
        "seed_oss": Thinking("<seed:think>", "</seed:think>"),
        "minimax_m3": Thinking("<mm:think>", "</mm:think>"),
        "cohere": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
        "kimi_k3": Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        "think_colon": Thinking("<|think:start|>", "<|think:end|>"),
        "kimi_vl": Thinking("◁think▷", "◁/think▷"),
    }
)
THINKING_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "deepseek_r1",
                "deepseek_v3",
                "ernie45",
                "exaone",
                "glm45",
                "granite",
                "hunyuan",
                "kimi_k2",
                "lfm2",
                "minimax_m2",
                "nemotron",
                "olmo3",
                "qwen3",
                "qwen3_5",
                "step3",
            ),
            "think",
        ),
        "harmony": HARMONY,
        "gpt_oss": HARMONY,
    }
)
REASONING_PARSERS = (NONE, *sorted({*THINKING, *THINKING_ALIASES, HARMONY}))
TOOL_CALL_PARSERS = (NONE, *sorted({*TOOL_FORMATS, *ALIASES, HARMONY}))

_DROPPED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kimi_k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        "cohere": ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    }
)
"""Marks around the content, which say nothing here."""
_SECTION = "<|tool_calls_section_begin|>"
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def nine_characters() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model's answers are written. Made once a model."""

    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    drop: tuple[str, ...] = ()
    harmony: bool = False
    nine: bool = False
    """Ids of calls are nine letters and digits, as Mistral's templates want them."""
    ends: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are marks of the format, and their texts: one may end an answer."""
    writing: Writing | None = None
    """How calls are to be written; None where their arguments are neither JSON nor XML."""

    @property
    def visible(self) -> frozenset[int]:
        """Special tokens whose text is needed."""
        return frozenset(self.ends)

    @property
    def make_id(self) -> MakeID:
        return nine_characters if self.nine else call_id

    @property
    def reasons(self) -> bool:
        """There is thinking to be told apart."""
        return self.harmony or self.thinking is not None

    @property
    def forced_writing(self) -> Writing:
        """How calls are to be written where there must be some."""
        return self.writing or HERMES_WRITING

    def prefix(self, prompt_end: str) -> str:
        """What the prompt holds of the answer already: the mark that opens the thinking, if it ends in one.

        Args:
            prompt_end: text of the prompt's last tokens, special ones included.
        """
        if self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.start):
            return self.thinking.start
        return ""

    def closes(self, prompt_end: str) -> bool:
        """The prompt ends behind a thinking that it has opened and closed itself: there is to be none."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.end)

    def opened(self, text: str) -> str:
        """The mark that opens the thinking, if a text that the answer goes on with does not close it."""
        thinking = self.thinking
        if thinking is None or text.rfind(thinking.start) <= text.rfind(thinking.end):
            return ""
        return thinking.start

    def parser(
        self,
        *,
        prefix: str = "",
        tools: Sequence[Tool] | None = None,
        parallel: bool = True,
        forced: bool = False,
        make_id: MakeID | None = None,
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            prefix: what the prompt holds of the answer already.
            tools: what may be called; None or empty: marks of calls are content.
            parallel: False: the answer ends with its first call.
            forced: calls are written as `forced_writing` has it.
        """
        cursor = Cursor(make_id or self.make_id, prefix=prefix, parallel=parallel)
        offered = Tools(tools) if tools else None
        if self.harmony:
            return AnswerParser(cursor, partial(harmony, tools=offered), self.ends)
        grammar = partial(
            answer,
            thinking=self.thinking,
            tools=offered,
            format=TOOL_FORMATS[HERMES] if forced and self.writing is None else self.tools,
            drop=self.drop,
        )
        return AnswerParser(cursor, grammar, self.ends)


def choose_format(
    tokenizer: Tokenizer, *, reasoning: str | None = None, tool_call: str | None = None
) -> OutputFormat:
    """The format of a model's answers.

    Args:
        reasoning, tool_call: names of parsers (`REASONING_PARSERS`, `TOOL_CALL_PARSERS`); None: found from
            the chat template and the vocabulary.

    Raises:
        InvalidParameter: an unknown name.
    """
    template = "\n".join(tokenizer.chat_templates)
    thinking_name = (
        _thinking_name(tokenizer, template) if reasoning is None else _named(reasoning, "reasoning")
    )
    tool_name = _tool_name(tokenizer, template) if tool_call is None else _named(tool_call, "tool_call")
    if HARMONY in (thinking_name, tool_name):
        return _with_tokens(OutputFormat(harmony=True), MARKS, tokenizer)
    thinking = THINKING.get(thinking_name)
    if thinking is not None and tool_name == "kimi_k2":
        thinking = Thinking(thinking.start, thinking.end, (_SECTION,))
    tools = TOOL_FORMATS.get(tool_name)
    drop = tuple(dict.fromkeys((*_DROPPED.get(thinking_name, ()), *_DROPPED.get(tool_name, ()))))
    found = OutputFormat(
        thinking, tools, drop, nine="length 9" in template, writing=writing_of(tool_name, template)
    )
    marks = [*drop, *(() if thinking is None else (thinking.start, thinking.end))]
    if tools is not None:
        marks += [*tools.starts, *INNER_MARKS.get(tool_name, ())]
    if found.writing is None:
        marks += ["<tool_call>", "</tool_call>"]
    return _with_tokens(found, marks, tokenizer)


def _with_tokens(found: OutputFormat, marks: Sequence[str], tokenizer: Tokenizer) -> OutputFormat:
    """Special tokens that are a mark or a part of one."""
    tokens = {
        token: text
        for text, token in tokenizer.special_tokens.items()
        if text and any(text in mark for mark in marks)
    }
    return replace(found, ends=tokens)


def _named(name: str, kind: str) -> str:
    aliases, names = (
        (THINKING_ALIASES, REASONING_PARSERS) if kind == "reasoning" else (ALIASES, TOOL_CALL_PARSERS)
    )
    if name not in names:
        raise InvalidParameter(
            f"{kind}_parser", f"{name!r} is no {kind} parser; choose from {', '.join(names)}."
        )
    return aliases.get(name, name)


def _thinking_name(tokenizer: Tokenizer, template: str) -> str:
    def known(*marks: str) -> bool:
        return all(mark in template or tokenizer.token_id(mark) is not None for mark in marks)

    if known(CHANNEL, MESSAGE, START) and "<think>" not in template:
        return HARMONY
    if known(*_XTML):
        return "kimi_k3"
    if known("<|channel>", "<channel|>"):
        return "gemma4"
    return next((name for name, thinking in THINKING.items() if known(thinking.start, thinking.end)), NONE)


def _tool_name(tokenizer: Tokenizer, template: str) -> str:
    for name, signs in TEMPLATE_SIGNS:
        if all(sign in template for sign in signs):
            return name
    named = tokenizer.tool_parser or ""
    given = UPSTREAM_NAMES.get(named, named)
    if given in TOOL_FORMATS:
        return given
    if all(tokenizer.token_id(mark) is not None for mark in _XTML):
        return "kimi_k3"
    if tokenizer.token_id("<|tool_call_start|>") is not None:
        return "lfm2"
    return HERMES
