"""From output events to the payloads of one surface: the chunks of a stream, or one whole answer.

Sources: OpenAI's API reference, Chat Completions and Completions (objects and streaming).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from chairlift.engine.output.events import (
    ContentDelta,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.engine.output.stream import ToolCall, WholeAnswer
from chairlift.server.choices import Choices
from chairlift.server.logprobs import TextOffsets, TokenTexts, chat_logprobs, completion_logprobs
from chairlift.server.payload import Payload


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of an answer repeats."""

    id: str
    model: str
    created: int
    fingerprint: str

    def payload(self, kind: str, choices: list[Payload]) -> Payload:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Encoder(Protocol):
    """Writes one answer of one or more choices. Indexes are those of the choices."""

    def opening(self) -> Iterable[Payload]:
        """Chunks sent at once, before the first token."""
        ...

    def delta(self, index: int, event: OutputEvent) -> Payload | None:
        """None where the event has nothing to show yet."""
        ...

    def closing(self, index: int, end: OutputEnd) -> Payload: ...

    def usage(self, ends: Sequence[OutputEnd]) -> Payload | None:
        """The last chunk; None unless asked for."""
        ...

    def whole(self, answers: Sequence[WholeAnswer]) -> Payload: ...


def usage_payload(ends: Sequence[OutputEnd], each: int = 1) -> Payload:
    """`each`: answers to a prompt, which stand together; the prompt counts once."""
    firsts = ends[::each]
    prompt = sum(end.usage.prompt_tokens for end in firsts)
    completion = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.usage.cached_tokens for end in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for end in ends)},
    }


class ChatEncoder:
    """`choices` answers to one prompt; chunks of `chat.completion.chunk`, or one `chat.completion`."""

    def __init__(
        self,
        envelope: Envelope,
        texts: TokenTexts,
        *,
        logprobs: bool,
        include_usage: bool,
        choices: int = 1,
        include_reasoning: bool = True,
    ) -> None:
        self._include_reasoning = include_reasoning
        self._choices = choices
        self._envelope = envelope
        self._texts = texts
        self._logprobs = logprobs
        self._include_usage = include_usage

    def _chunk(self, choices: list[Payload]) -> Payload:
        payload = self._envelope.payload("chat.completion.chunk", choices)
        if self._include_usage:
            payload["usage"] = None
        return payload

    def _choice(
        self, index: int, delta: Payload, logprobs: Payload | None = None, reason: str | None = None
    ) -> Payload:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> Iterable[Payload]:
        for index in range(self._choices):
            yield self._chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def delta(self, index: int, event: OutputEvent) -> Payload | None:
        logprobs = None
        match event:
            case ContentDelta():
                if self._logprobs and event.logprobs:
                    logprobs = chat_logprobs(event.logprobs, self._texts)
                elif not event.text:
                    return None
                delta: Payload = {"content": event.text}
            case ReasoningDelta():
                if not self._include_reasoning:
                    return None
                delta = {"reasoning_content": event.text}
            case RefusalDelta():
                delta = {"refusal": event.text}
            case ToolCallStart():
                call: Payload = {"index": event.index, "id": event.id, "type": "function"}
                delta = {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}
            case ToolCallArguments():
                delta = {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
            case ToolCallEnd():
                return None
        return self._chunk([self._choice(index, delta, logprobs)])

    def closing(self, index: int, end: OutputEnd) -> Payload:
        return self._chunk([self._choice(index, {}, None, end.reason.value)])

    def usage(self, ends: Sequence[OutputEnd]) -> Payload | None:
        return (
            {**self._chunk([]), "usage": usage_payload(ends, self._choices)} if self._include_usage else None
        )

    def whole(self, answers: Sequence[WholeAnswer]) -> Payload:
        choices: list[Payload] = [
            {
                "index": index,
                "message": _message(answer, reasoning=self._include_reasoning),
                "logprobs": chat_logprobs(answer.logprobs, self._texts) if self._logprobs else None,
                "finish_reason": answer.end.reason.value,
            }
            for index, answer in enumerate(answers)
        ]
        payload = self._envelope.payload("chat.completion", choices)
        payload["usage"] = usage_payload([answer.end for answer in answers], self._choices)
        return payload


def _message(answer: WholeAnswer, *, reasoning: bool) -> Payload:
    """`content` is null where the answer is nothing but calls or a refusal, as OpenAI's is."""
    silent = bool(answer.tool_calls or answer.refusal)
    message: Payload = {
        "role": "assistant",
        "content": answer.content or (None if silent else ""),
        "refusal": answer.refusal or None,
    }
    if reasoning and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.tool_calls]
    return message


def _tool_call(call: ToolCall) -> Payload:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class CompletionEncoder:
    """`choices` a prompt; `text_completion`, streamed or not. Content only: its answers are read by a
    `PlainParser`. `echoes`: how each choice's text begins."""

    def __init__(
        self,
        envelope: Envelope,
        texts: TokenTexts,
        *,
        logprobs: bool,
        include_usage: bool,
        echoes: Sequence[str] = (),
        choices: Choices | None = None,
    ) -> None:
        self._choices = choices or Choices()
        self._envelope = envelope
        self._texts = texts
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._echoes = tuple(echoes)
        self._offsets = defaultdict[int, TextOffsets](lambda: TextOffsets(texts))

    def _chunk(self, choices: list[Payload]) -> Payload:
        payload = self._envelope.payload("text_completion", choices)
        if self._include_usage:
            payload["usage"] = None
        return payload

    def _choice(
        self, index: int, text: str, logprobs: Payload | None = None, reason: str | None = None
    ) -> Payload:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> Iterable[Payload]:
        for index, echo in enumerate(self._echoes):
            yield self._chunk([self._choice(index, echo)])

    def delta(self, index: int, event: OutputEvent) -> Payload | None:
        if not isinstance(event, ContentDelta):
            return None
        shows_logprobs = self._logprobs and bool(event.logprobs)
        if not event.text and not shows_logprobs:
            return None
        logprobs: Payload | None = None
        if shows_logprobs:
            logprobs = completion_logprobs(event.logprobs, self._texts, self._offsets[index])
        return self._chunk([self._choice(index, event.text, logprobs)])

    def closing(self, index: int, end: OutputEnd) -> Payload:
        return self._chunk([self._choice(index, "", None, end.reason.value)])

    def usage(self, ends: Sequence[OutputEnd]) -> Payload | None:
        return (
            {**self._chunk([]), "usage": usage_payload(ends, self._choices.drawn)}
            if self._include_usage
            else None
        )

    def whole(self, answers: Sequence[WholeAnswer]) -> Payload:
        choices: list[Payload] = []
        for index, answer in enumerate(self._choices.best(answers)):
            echo = self._echoes[index] if self._echoes else ""
            logprobs: Payload | None = None
            if self._logprobs:
                logprobs = completion_logprobs(answer.logprobs, self._texts, self._offsets[index])
            choices.append(self._choice(index, echo + answer.content, logprobs, answer.end.reason.value))
        payload = self._envelope.payload("text_completion", choices)
        payload["usage"] = usage_payload([answer.end for answer in answers], self._choices.drawn)
        return payload
