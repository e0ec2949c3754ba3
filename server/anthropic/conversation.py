"""Anthropic's messages as chat messages.

What has no place in a chat message moves: results of tools are messages of their own, before what else their
message holds; their images follow as the user's, since few templates show an image in a result; documents and
search results are text. Turns of one role in succession are one turn, as Anthropic has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.server.anthropic.context import CLEARED, clears_inputs
from chairlift.server.anthropic.signature import sealed_thinking
from chairlift.server.errors import APIError, invalid, shorten, unsupported
from chairlift.server.wire.messages import (
    Block,
    ClearToolUses,
    DocumentBlock,
    ImageBlock,
    Message,
    PlainTextSource,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)

Fields = dict[str, object]

_ACCOUNTING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""What Claude Code puts first in the system prompt, for Anthropic's books. It is another one in every session
or request, so that no prompt would have a beginning in common with the one before."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a chat message, and the block that it was made of."""

    fields: Fields
    place: str
    result: str | None = None
    """The result of a tool that it was moved out of."""


@dataclass(slots=True)
class Turn:
    """One chat message in the making."""

    role: str
    place: str
    parts: list[Part] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Fields] = field(default_factory=list)
    more: Fields = field(default_factory=dict)
    exchange: int = 0
    """Counts what the user said, results of tools aside."""

    @property
    def message(self) -> Fields:
        content = [part.fields for part in self.parts]
        message: Fields = {"role": self.role, "content": content or "", **self.more}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thinking:
            message["reasoning_content"] = "\n".join(self.thinking)
        return message


class Conversation:
    """One request's: opened, filled, and cleared of what is old."""

    def __init__(self) -> None:
        self.cleared_thinking: list[str] = []
        """What `clear` left out, exchange by exchange."""
        self.cleared_results = 0
        self._turns: list[Turn] = []
        self._exchange = 0
        self._tool_names: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}
        """Calls of the last assistant's turn that have no result yet: where they stand, by id."""

    def open(self, system: str | Sequence[TextBlock] | None) -> None:
        """What the request says outside of its messages."""
        if isinstance(system, str):
            texts = [(system, "system")]
        else:
            texts = [(block.text, f"system[{at}]") for at, block in enumerate(system or ())]
        said = [(_ACCOUNTING.sub("", text), place) for text, place in texts]
        parts = [_text(text, place) for text, place in said if text]
        if parts:
            self._turns.append(Turn("system", "system", parts))

    def add(self, message: Message, place: str) -> None:
        """Raises: APIError: 400, for a block that is not for its role."""
        content = message.content
        if isinstance(content, str):
            blocks: list[tuple[Block, str]] = [(TextBlock(type="text", text=content), f"{place}.content")]
        else:
            blocks = [(block, f"{place}.content[{at}]") for at, block in enumerate(content)]
        if message.role == "assistant":
            self._answer(blocks, place)
        elif not blocks:
            raise invalid(
                f"{place}.content must hold at least one block.", f"{place}.content", "invalid_value"
            )
        else:
            self._question(blocks, message.role, place)

    def end(self) -> None:
        """All messages are added. Raises: APIError: 400 where others spoke since a call without a result."""
        if self._turns and self._turns[-1].role != "assistant":
            self._check_answered()

    def clear(self, keep_thinking: int | None, results: ClearToolUses | None) -> None:
        """Leave out what is old, once all messages are added.

        Args:
            keep_thinking: so many of the last exchanges with thinking keep it; None: all.
            results: says which results of tools go, and which arguments of their calls; None: none.
        """
        if keep_thinking is not None:
            thoughts: dict[int, list[str]] = {}
            for turn in self._turns:
                if turn.thinking:
                    thoughts.setdefault(turn.exchange, []).extend(turn.thinking)
            old = sorted(thoughts)[:-keep_thinking]
            self.cleared_thinking = ["\n".join(thoughts[exchange]) for exchange in old]
            for turn in self._turns:
                if old and turn.exchange <= old[-1]:
                    turn.thinking.clear()
        if results is not None:
            self._clear_results(results)

    @property
    def messages(self) -> list[Fields]:
        """Of a chat request."""
        return [turn.message for turn in self._turns]

    @property
    def places(self) -> dict[str, str]:
        """Where the places of `messages` stand in the request."""
        found: dict[str, str] = {}
        for index, turn in enumerate(self._turns):
            at = f"messages[{index}]"
            found[at] = turn.place
            for number, part in enumerate(turn.parts):
                found[f"{at}.content[{number}]"] = part.place
        return found

    @property
    def results(self) -> int:
        return sum(turn.role == "tool" for turn in self._turns)

    def _clear_results(self, edit: ClearToolUses) -> None:
        results = [turn for turn in self._turns if turn.role == "tool"]
        old = results[: max(len(results) - edit.keep.value, 0)]
        old = [turn for turn in old if turn.more["name"] not in (edit.exclude_tools or ())]
        self.cleared_results = len(old)
        for turn in old:
            turn.parts = [_text(CLEARED, turn.place)]
        places = {turn.place for turn in old}
        calls = {turn.more["tool_call_id"] for turn in old if clears_inputs(edit, str(turn.more["name"]))}
        for turn in self._turns:
            turn.calls = [_without_input(call) if call["id"] in calls else call for call in turn.calls]
            if turn.role == "user":
                turn.parts = [part for part in turn.parts if part.result not in places]
        self._turns = [turn for turn in self._turns if turn.parts or turn.role != "user"]

    def _turn(self, role: str, place: str) -> Turn:
        """The last one, if it is of the same role."""
        if not self._turns or self._turns[-1].role != role or role not in ("user", "assistant"):
            self._turns.append(Turn(role, place, exchange=self._exchange))
        return self._turns[-1]

    def _check_answered(self) -> None:
        for id, place in self._unanswered.items():
            raise invalid(
                f"{place}: no tool_result follows for the tool_use {shorten(id)!r}.", place, "invalid_value"
            )

    def _answer(self, blocks: Sequence[tuple[Block, str]], place: str) -> None:
        if self._turns and self._turns[-1].role != "assistant":
            self._check_answered()
        turn = self._turn("assistant", place)
        for block, where in blocks:
            if isinstance(block, TextBlock):
                turn.parts.append(_text(block.text, where))
            elif isinstance(block, ThinkingBlock):
                thinking = block.thinking or sealed_thinking(block.signature)
                if thinking:
                    turn.thinking.append(thinking)
            elif isinstance(block, ToolUseBlock):
                if block.id in self._unanswered:
                    raise invalid(
                        f"{where}.id repeats {shorten(block.id)!r}.", f"{where}.id", "invalid_value"
                    )
                self._unanswered[block.id] = where
                self._tool_names[block.id] = block.name
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                turn.calls.append({"id": block.id, "type": "function", "function": function})
            elif not isinstance(block, RedactedThinkingBlock):
                raise _misplaced(block, where, "assistant")

    def _question(self, blocks: Sequence[tuple[Block, str]], role: str, place: str) -> None:
        """Of the user, or of the system in mid-conversation."""
        parts: list[Part] = []
        said = False
        for block, where in blocks:
            if isinstance(block, ToolResultBlock) and role == "user":
                parts += self._result(block, where)
        for block, where in blocks:
            if isinstance(block, TextBlock) or (
                role == "user" and isinstance(block, ImageBlock | DocumentBlock | SearchResultBlock)
            ):
                parts += _parts(block, where)
                said = True
            elif not (isinstance(block, ToolResultBlock) and role == "user"):
                raise _misplaced(block, where, role)
        self._exchange += said and role == "user"
        if parts:
            self._turn(role, place).parts += parts

    def _result(self, result: ToolResultBlock, place: str) -> list[Part]:
        """Adds the result's own message, and returns its images."""
        if self._unanswered.pop(result.tool_use_id, None) is None:
            where = f"{place}.tool_use_id"
            known = result.tool_use_id in self._tool_names
            raise invalid(
                f"{where}: "
                + (
                    f"{shorten(result.tool_use_id)!r} has its result, or is not of the turn before."
                    if known
                    else f"no tool_use before it has the id {shorten(result.tool_use_id)!r}."
                ),
                where,
                "invalid_value",
            )
        content = result.content or ""
        if isinstance(content, str):
            parts = [_text(content, f"{place}.content")]
        else:
            parts = [
                part for at, block in enumerate(content) for part in _parts(block, f"{place}.content[{at}]")
            ]
        texts = [part for part in parts if part.fields["type"] == "text"]
        if result.is_error:
            texts = [_text("Error:", f"{place}.is_error"), *texts]
        turn = Turn("tool", place, texts, more={"tool_call_id": result.tool_use_id}, exchange=self._exchange)
        turn.more["name"] = self._tool_names[result.tool_use_id]
        self._turns.append(turn)
        return [Part(part.fields, part.place, place) for part in parts if part.fields["type"] != "text"]


def _without_input(call: Fields) -> Fields:
    function = call["function"]
    assert isinstance(function, dict)
    return {**call, "function": {**function, "arguments": "{}"}}


def _parts(block: ResultBlock, place: str) -> list[Part]:
    if isinstance(block, TextBlock):
        return [_text(block.text, place)]
    if isinstance(block, ToolReferenceBlock):
        return [_text(block.tool_name, place)]
    if isinstance(block, ImageBlock):
        source = block.source
        url = (
            source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
        )
        return [Part({"type": "image_url", "image_url": {"url": url}}, place)]
    if isinstance(block, SearchResultBlock):
        texts = [block.title, block.source, *(text.text for text in block.content)]
        return [_text("\n".join(texts), place)]
    head = [_text(text, place) for text in (block.title, block.context) if text]
    if isinstance(block.source, PlainTextSource):
        return [*head, _text(block.source.data, place)]
    content = block.source.content
    if isinstance(content, str):
        return [*head, _text(content, place)]
    return head + [
        part for at, inner in enumerate(content) for part in _parts(inner, f"{place}.source.content[{at}]")
    ]


def _text(text: str, place: str) -> Part:
    return Part({"type": "text", "text": text}, place)


def _misplaced(block: Block, place: str, role: str) -> APIError:
    return unsupported(place, f"{place} is a {block.type} block, which the {role} role does not have.")
