"""From the engine's events to the payloads of one surface: the chunks of a stream, or one whole answer.

Sources: OpenAI's API reference, Chat Completions and Completions (objects and streaming).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chairlift.engine.events import Finished, FinishReason, TextDelta, TokenLogprob, Usage
from chairlift.server.errors import APIError
from chairlift.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs

Payload = dict[str, object]


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


@dataclass(slots=True)
class Answer:
    """One choice, put together from its events."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: TextDelta | Finished) -> None:
        if isinstance(event, Finished):
            self.finished = event
        else:
            self.texts.append(event.text)
            self.logprobs.extend(event.logprobs)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def end(self) -> Finished:
        if self.finished is None:
            raise APIError(500, "The answer broke off.", kind="server_error", code="engine_error")
        return self.finished


class Encoder(Protocol):
    """Writes one answer of one or more choices. Indexes are those of the choices."""

    def opening(self) -> Iterable[Payload]:
        """Chunks sent at once, before the first token."""
        ...

    def delta(self, index: int, event: TextDelta) -> Payload | None:
        """None where the event has nothing to show yet."""
        ...

    def closing(self, index: int, event: Finished) -> Payload: ...

    def usage(self, usages: Sequence[Usage]) -> Payload | None:
        """The last chunk; None unless asked for."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Payload: ...


def finish_reason(event: Finished) -> str:
    """Raises: APIError where the answer did not end by itself."""
    if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return event.reason.value
    raise APIError(500, "The answer was cancelled.", kind="server_error", code="cancelled")


def usage_payload(usages: Sequence[Usage]) -> Payload:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


class ChatEncoder:
    """One choice; chunks of `chat.completion.chunk`, or one `chat.completion`."""

    def __init__(self, envelope: Envelope, texts: TokenTexts, *, logprobs: bool, include_usage: bool) -> None:
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
        yield self._chunk([self._choice(0, {"role": "assistant", "content": ""})])

    def delta(self, index: int, event: TextDelta) -> Payload | None:
        shows_logprobs = self._logprobs and bool(event.logprobs)
        if not event.text and not shows_logprobs:
            return None
        logprobs = chat_logprobs(event.logprobs, self._texts) if shows_logprobs else None
        return self._chunk([self._choice(index, {"content": event.text}, logprobs)])

    def closing(self, index: int, event: Finished) -> Payload:
        return self._chunk([self._choice(index, {}, None, finish_reason(event))])

    def usage(self, usages: Sequence[Usage]) -> Payload | None:
        return {**self._chunk([]), "usage": usage_payload(usages)} if self._include_usage else None

    def whole(self, answers: Sequence[Answer]) -> Payload:
        choices: list[Payload] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": chat_logprobs(answer.logprobs, self._texts) if self._logprobs else None,
                "finish_reason": finish_reason(answer.end),
            }
            for index, answer in enumerate(answers)
        ]
        payload = self._envelope.payload("chat.completion", choices)
        payload["usage"] = usage_payload([answer.end.usage for answer in answers])
        return payload


class CompletionEncoder:
    """A choice a prompt; `text_completion`, streamed or not. `echoes`: how each choice's text begins."""

    def __init__(
        self,
        envelope: Envelope,
        texts: TokenTexts,
        *,
        logprobs: bool,
        include_usage: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._envelope = envelope
        self._texts = texts
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._echoes = tuple(echoes)
        self._offsets: dict[int, int] = {}

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

    def delta(self, index: int, event: TextDelta) -> Payload | None:
        shows_logprobs = self._logprobs and bool(event.logprobs)
        if not event.text and not shows_logprobs:
            return None
        logprobs: Payload | None = None
        if shows_logprobs:
            logprobs, self._offsets[index] = completion_logprobs(
                event.logprobs, self._texts, self._offsets.get(index, 0)
            )
        return self._chunk([self._choice(index, event.text, logprobs)])

    def closing(self, index: int, event: Finished) -> Payload:
        return self._chunk([self._choice(index, "", None, finish_reason(event))])

    def usage(self, usages: Sequence[Usage]) -> Payload | None:
        return {**self._chunk([]), "usage": usage_payload(usages)} if self._include_usage else None

    def whole(self, answers: Sequence[Answer]) -> Payload:
        choices: list[Payload] = []
        for index, answer in enumerate(answers):
            echo = self._echoes[index] if self._echoes else ""
            logprobs = completion_logprobs(answer.logprobs, self._texts, 0)[0] if self._logprobs else None
            choices.append(self._choice(index, echo + answer.text, logprobs, finish_reason(answer.end)))
        payload = self._envelope.payload("text_completion", choices)
        payload["usage"] = usage_payload([answer.end.usage for answer in answers])
        return payload
