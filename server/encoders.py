"""From output events to the payloads of one surface: the chunks of a stream, or one whole answer.

Sources: OpenAI's API reference, Chat Completions and Completions (objects and streaming).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from chairlift.engine.events import TokenLogprob
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
from chairlift.engine.output.stream import ToolCall, WholeAnswer
from chairlift.server.choices import Choices
from chairlift.server.logprobs import (
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
)
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

    @property
    def heavy(self) -> bool:
        """What comes next may take long to write: not on the event loop."""
        ...

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
    """`choices` answers to one prompt; chunks of `chat.completion.chunk`, or one `chat.completion`.

    Args:
        texts: None: no log probabilities are shown.
        may_call: an answer may be nothing but calls, so its first chunk waits for what it holds: OpenAI's
            `content` is null in a message of calls alone, and a stream whose first content is "" has some.
    """

    def __init__(
        self,
        envelope: Envelope,
        texts: TokenTexts | None,
        *,
        include_usage: bool,
        choices: int = 1,
        include_reasoning: bool = True,
        may_call: bool = False,
    ) -> None:
        self._include_reasoning = include_reasoning
        self._unopened = set(range(choices)) if may_call else set[int]()
        self._choices = choices
        self._envelope = envelope
        self._texts = texts
        self._include_usage = include_usage

    @property
    def heavy(self) -> bool:
        return False

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
            if index not in self._unopened:
                yield self._chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def _opened(self, index: int, delta: Payload, content: Payload) -> Payload:
        """With what the first delta of a choice holds before all else."""
        if index not in self._unopened:
            return delta
        self._unopened.remove(index)
        return {"role": "assistant", **content, **delta}

    def delta(self, index: int, event: OutputEvent) -> Payload | None:
        logprobs = None
        content: Payload = {}
        match event:
            case ContentDelta():
                if self._texts is not None and event.logprobs:
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
                content = {"content": None}
            case ToolCallArguments():
                delta = {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
            case ToolCallEnd():
                return None
        return self._chunk([self._choice(index, self._opened(index, delta, content), logprobs)])

    def closing(self, index: int, end: OutputEnd) -> Payload:
        delta = self._opened(index, {}, {"content": ""})
        return self._chunk([self._choice(index, delta, None, end.reason.value)])

    def usage(self, ends: Sequence[OutputEnd]) -> Payload | None:
        return (
            {**self._chunk([]), "usage": usage_payload(ends, self._choices)} if self._include_usage else None
        )

    def whole(self, answers: Sequence[WholeAnswer]) -> Payload:
        choices: list[Payload] = [
            {
                "index": index,
                "message": _message(answer, reasoning=self._include_reasoning),
                "logprobs": None if self._texts is None else chat_logprobs(answer.logprobs, self._texts),
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


class Scored(Protocol):
    """A `RequestHandle`."""

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]: ...


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a choice's text begins with."""

    text: str
    tokens: tuple[int, ...]


class CompletionEncoder:
    """`choices` a prompt; `text_completion`, streamed or not. Content only: its answers are read by a
    `PlainParser`.

    Args:
        texts: None: no log probabilities are shown.
        echoes: of each choice that is shown; empty where the prompt is not.
        scored: the requests, in order; they know the prompt's log probabilities once the answer has begun.
        silent: nothing is to be answered: what was drawn, since every request draws, is left out.
    """

    def __init__(
        self,
        envelope: Envelope,
        texts: TokenTexts | None,
        *,
        include_usage: bool,
        echoes: Sequence[Echo] = (),
        choices: Choices | None = None,
        scored: Sequence[Scored] = (),
        silent: bool = False,
    ) -> None:
        self._scored = tuple(scored)
        self._silent = silent
        self._choices = choices or Choices()
        self._envelope = envelope
        self._texts = texts
        self._include_usage = include_usage
        self._echoes = tuple(echoes)
        self._unopened = set[int]() if texts is None else set(range(len(self._echoes)))
        """Choices whose prompt comes with the first of their answer: its log probabilities are known then."""
        self._offsets = {} if texts is None else defaultdict[int, TextOffsets](partial(TextOffsets, texts))

    def _chunk(self, choices: list[Payload]) -> Payload:
        payload = self._envelope.payload("text_completion", choices)
        if self._include_usage:
            payload["usage"] = None
        return payload

    def _choice(
        self, index: int, text: str, logprobs: Payload | None = None, reason: str | None = None
    ) -> Payload:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    @property
    def heavy(self) -> bool:
        return bool(self._unopened)

    def opening(self) -> Iterable[Payload]:
        for index, echo in enumerate(self._echoes):
            if index not in self._unopened:
                yield self._chunk([self._choice(index, echo.text)])

    def _said(
        self, index: int, drawn: int, text: str, tokens: Sequence[TokenLogprob]
    ) -> tuple[str, Payload | None]:
        """Text and log probabilities of a choice, the prompt before them the first time.

        Args:
            drawn: number of the request that is shown, or of another one of the same prompt.
        """
        if self._silent:
            text, tokens = "", ()
        if self._texts is None:
            return text, None
        offsets = self._offsets[index]
        if index in self._unopened:
            self._unopened.remove(index)
            echo, scored = self._echoes[index], self._scored[drawn].prompt_logprobs
            told = echoed_logprobs(echo.text, echo.tokens, scored, tokens, self._texts, offsets)
            return echo.text + text, told
        if not tokens:
            return text, None
        return text, completion_logprobs(tokens, self._texts, offsets)

    def delta(self, index: int, event: OutputEvent) -> Payload | None:
        if not isinstance(event, ContentDelta):
            return None
        text, logprobs = self._said(index, index, event.text, event.logprobs)
        if not text and logprobs is None:
            return None
        return self._chunk([self._choice(index, text, logprobs)])

    def closing(self, index: int, end: OutputEnd) -> Payload:
        text, logprobs = self._said(index, index, "", ())
        return self._chunk([self._choice(index, text, logprobs, self._reason(end))])

    def _reason(self, end: OutputEnd) -> str:
        return EndReason.LENGTH.value if self._silent else end.reason.value

    def _usage(self, ends: Sequence[OutputEnd]) -> Payload:
        if self._silent:
            ends = [replace(end, usage=replace(end.usage, completion_tokens=0)) for end in ends]
        return usage_payload(ends, self._choices.drawn)

    def usage(self, ends: Sequence[OutputEnd]) -> Payload | None:
        return {**self._chunk([]), "usage": self._usage(ends)} if self._include_usage else None

    def whole(self, answers: Sequence[WholeAnswer]) -> Payload:
        choices: list[Payload] = []
        for index, answer in enumerate(self._choices.best(answers)):
            drawn = index // self._choices.shown * self._choices.drawn
            echo = self._echoes[index].text if self._echoes and index not in self._unopened else ""
            text, logprobs = self._said(index, drawn, answer.content, answer.logprobs)
            if self._texts is not None and logprobs is None:
                logprobs = completion_logprobs((), self._texts, self._offsets[index])
            choices.append(self._choice(index, echo + text, logprobs, self._reason(answer.end)))
        payload = self._envelope.payload("text_completion", choices)
        payload["usage"] = self._usage([answer.end for answer in answers])
        return payload
