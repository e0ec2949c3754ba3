"""From output events to Anthropic's: the events of a stream, or one whole message put together from them.

Source: Anthropic's API reference, Messages and Streaming Messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic_core import from_json

from chairlift.engine.events import Usage
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.server.anthropic.signature import signature_of
from chairlift.server.payload import Payload


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of an answer before its first token."""

    id: str
    model: str
    prompt_tokens: int
    omits_thinking: bool = False
    """The client asked not to be shown the thinking."""
    context_management: Payload | None = None
    """What became of the edits that were asked for; None where none were."""

    def message(self) -> Payload:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage_payload(Usage(self.prompt_tokens, 0), 0),
        }


def usage_payload(usage: Usage, reasoning_tokens: int) -> Payload:
    """Anthropic counts what was read from the cache apart from the rest of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }


class MessageEncoder:
    """Writes one message. For one answer: every event once, in order."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._blocks = 0
        """So many have begun."""
        self._open: str | None = None
        """Kind of the last one, while more of it may come."""
        self._thinking: list[str] = []
        """Of the open block."""
        self._refused = False

    def opening(self) -> Payload:
        return {"type": "message_start", "message": self._head.message()}

    def encode(self, event: OutputEvent | OutputEnd) -> Iterable[Payload]:
        match event:
            case ContentDelta():
                yield from self._text(event.text)
            case RefusalDelta():
                self._refused = True
                yield from self._text(event.text)
            case ReasoningDelta():
                yield from self._reasoning(event.text)
            case ToolCallStart():
                yield from self._close()
                yield self._start("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case ToolCallArguments():
                if event.text:
                    yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            case ToolCallEnd():
                yield from self._close()
            case OutputEnd():
                yield from self._close()
                yield self._ending(event)
                yield {"type": "message_stop"}

    def _text(self, text: str) -> Iterable[Payload]:
        if not text:
            return
        if self._open != "text":
            yield from self._close()
            yield self._start("text", {"text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _reasoning(self, text: str) -> Iterable[Payload]:
        if not text:
            return
        if self._open != "thinking":
            yield from self._close()
            yield self._start("thinking", {"thinking": "", "signature": ""})
        self._thinking.append(text)
        if not self._head.omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _start(self, kind: str, fields: Payload) -> Payload:
        self._open = kind
        self._blocks += 1
        return self._event("content_block_start", {"content_block": {"type": kind, **fields}})

    def _delta(self, delta: Payload) -> Payload:
        return self._event("content_block_delta", {"delta": delta})

    def _close(self) -> Iterable[Payload]:
        if self._open is None:
            return
        if self._open == "thinking":
            signature = signature_of("".join(self._thinking), omitted=self._head.omits_thinking)
            yield self._delta({"type": "signature_delta", "signature": signature})
            self._thinking.clear()
        yield self._event("content_block_stop", {})
        self._open = None

    def _event(self, kind: str, fields: Payload) -> Payload:
        return {"type": kind, "index": self._blocks - 1, **fields}

    def _ending(self, end: OutputEnd) -> Payload:
        reason = self._stop_reason(end)
        payload: Payload = {
            "type": "message_delta",
            "delta": {
                "stop_reason": reason,
                "stop_sequence": end.stop if reason == "stop_sequence" else None,
                "stop_details": {"type": "refusal", "category": None, "explanation": None}
                if reason == "refusal"
                else None,
            },
            "usage": usage_payload(end.usage, end.reasoning_tokens),
        }
        if self._head.context_management is not None:
            payload["context_management"] = self._head.context_management
        return payload

    def _stop_reason(self, end: OutputEnd) -> str:
        if end.reason is EndReason.LENGTH:
            return "max_tokens"
        if end.reason is EndReason.TOOL_CALLS:
            return "tool_use"
        if isinstance(end.stop, str):
            return "stop_sequence"
        return "refusal" if self._refused else "end_turn"


class WholeMessage:
    """Puts the events of a stream together, as a client would."""

    def __init__(self, encoder: MessageEncoder) -> None:
        self._encoder = encoder
        message = encoder.opening()["message"]
        assert isinstance(message, dict)
        self._message: Payload = message
        self._blocks: list[Payload] = []
        self._pieces: list[list[str]] = []
        """Of each block's text, thinking or input."""

    def add(self, event: OutputEvent | OutputEnd) -> None:
        for payload in self._encoder.encode(event):
            match payload:
                case {"type": "content_block_start", "content_block": dict(block)}:
                    self._blocks.append(dict(block))
                    self._pieces.append([])
                case {"type": "content_block_delta", "delta": {"signature": signature}}:
                    self._blocks[-1]["signature"] = signature
                case {"type": "content_block_delta", "delta": {"type": _, **piece}}:
                    self._pieces[-1] += [str(text) for text in piece.values()]
                case {"type": "content_block_stop"}:
                    self._finish_block()
                case {"type": "message_delta", "delta": dict(delta), **rest}:
                    self._message.update(delta)
                    self._message.update(rest)

    def payload(self) -> Payload:
        return {**self._message, "content": self._blocks}

    def _finish_block(self) -> None:
        block, text = self._blocks[-1], "".join(self._pieces[-1])
        if block["type"] == "tool_use":
            block["input"] = _as_far_as_it_came(text)
        else:
            block[str(block["type"])] = text


def _as_far_as_it_came(arguments: str) -> Payload:
    """An object, also where its text broke off at max_tokens, as clients read it while it comes."""
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
