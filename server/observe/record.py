"""What is known of one HTTP request, gathered on its way through the server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Scope

from chairlift.engine.events import Failed, FinishReason, Usage
from chairlift.engine.handle import RequestHandle
from chairlift.server.errors import request_id_of
from chairlift.server.security.gate import key_of

if TYPE_CHECKING:
    from chairlift.server.errors import APIError

CURRENT: ContextVar[RequestRecord | None] = ContextVar("chairlift request", default=None)
"""Of the request that the running task answers."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
MOST_BODY = 100_000
"""Bytes of a body that are kept for the log."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """Prompts that went to one engine together."""

    model: str
    handles: tuple[RequestHandle, ...]
    each: int
    """Answers to a prompt, which stand together."""

    @property
    def prompts(self) -> list[tuple[RequestHandle, ...]]:
        return [self.handles[start : start + self.each] for start in range(0, len(self.handles), self.each)]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """On the event loop, but for `body`, which is set before work goes to a thread."""

    scope: Scope
    started: float
    """Of the monotonic clock, as are the times of handles."""
    started_ns: int
    """The same moment, since 1970."""
    given_id: str | None
    """The client's own `x-request-id`."""
    keeps_body: bool = False
    body: bytes | None = None
    """What was asked, as far as it is to be told."""
    status: int = 0
    """0: no answer has begun."""
    streamed: bool = False
    answer_id: str | None = None
    """The answer's own id, where it has one."""
    complete: bool = False
    """The answer was sent to its end."""
    ended: float | None = None
    """When the HTTP request ended, whatever goes on in the background."""
    error: str | None = None
    """The code of the refusal, else its type."""
    error_param: str | None = None
    error_message: str | None = None
    """In the server's own words; None where it might hold a client's."""
    trace_id: str | None = None
    submitted: list[Submitted] = field(default_factory=list)

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def route(self) -> str | None:
        """The template of the path; None where no route was found."""
        path = getattr(self.scope.get("route"), "path", None)
        return path if isinstance(path, str) else None

    @property
    def client(self) -> str | None:
        client = self.scope.get("client")
        return str(client[0]) if client else None

    @property
    def key(self) -> str | None:
        """The name of the client's key, never the key; None where there are none, or none was right."""
        key = key_of(self.scope)
        return key.name if key is not None else None

    @property
    def request_id(self) -> str:
        """The client's, where it is one, else the answer's or one of our own."""
        state = self.scope.get("state", {})
        if self.given_id is not None or "request_id" in state or self.answer_id is None:
            return self.given_id or request_id_of(self.scope)
        return self.answer_id

    @property
    def handles(self) -> list[RequestHandle]:
        return [handle for submitted in self.submitted for handle in submitted.handles]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(submitted.model for submitted in self.submitted))

    @property
    def abandoned(self) -> bool:
        """The client left before the answer's end."""
        return self.ended is not None and not self.complete

    def refuse(self, error: APIError) -> None:
        """It is answered with this. What is wrong with a request may be told in the client's own words."""
        self.error = error.code or error.kind
        self.error_param = error.param
        if error.status >= 429:
            self.error_message = error.message

    def when_done(self, report: Callable[[RequestRecord], None]) -> None:
        """Once every answer has ended; at once if that is so. Those in the background outlive the request."""
        left = sum(not handle.ended for handle in self.handles)
        if not left:
            report(self)
            return

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                report(self)

        for handle in self.handles:
            if not handle.ended:
                handle.when_ended(one_ended)

    @property
    def outcome(self) -> Outcome | None:
        """Of its answers together; None where nothing was generated."""
        return Outcome.of(self) if self.submitted else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all answers of a request, in tokens and seconds."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float | None
    """From submission to admission, of the one admitted first."""
    first_token_s: float | None
    """From the request's arrival to the first token."""
    interval_s: float | None
    """Mean between two tokens."""
    finish_reasons: tuple[str, ...]
    error: str | None
    """What the first that failed failed with."""

    @classmethod
    def of(cls, record: RequestRecord) -> Outcome:
        prompts = [handles for submitted in record.submitted for handles in submitted.prompts]
        usages = [[_usage(handle) for handle in handles] for handles in prompts]
        timings = [handle.timing for handle in record.handles]
        admitted = [(t.admitted, t.admitted - t.queued) for t in timings if t.admitted is not None]
        firsts = [timing.first_token for timing in timings if timing.first_token is not None]
        spent, intervals = 0.0, 0
        for handle in record.handles:
            timing, drawn = handle.timing, _usage(handle).completion_tokens
            if timing.first_token is not None and timing.last_token is not None and drawn > 1:
                spent += timing.last_token - timing.first_token
                intervals += drawn - 1
        ends = [handle.outcome for handle in record.handles]
        reasons = [FinishReason.ERROR if isinstance(end, Failed) else end.reason for end in ends if end]
        errors = [end.error.message for end in ends if isinstance(end, Failed)]
        return cls(
            prompt_tokens=sum(of_prompt[0].prompt_tokens for of_prompt in usages),
            cached_tokens=sum(of_prompt[0].cached_tokens for of_prompt in usages),
            output_tokens=sum(usage.completion_tokens for of_prompt in usages for usage in of_prompt),
            queue_s=min(admitted)[1] if admitted else None,
            first_token_s=min(firsts) - record.started if firsts else None,
            interval_s=spent / intervals if intervals else None,
            finish_reasons=tuple(dict.fromkeys(reason.value for reason in reasons)),
            error=errors[0] if errors else None,
        )


def _usage(handle: RequestHandle) -> Usage:
    end = handle.outcome
    return end.usage if end is not None else Usage(len(handle.request.prompt_token_ids), 0)


def begin_record(scope: Scope, *, keeps_body: bool) -> RequestRecord:
    return RequestRecord(scope, time.monotonic(), time.time_ns(), given_id(scope), keeps_body=keeps_body)


def given_id(scope: Scope) -> str | None:
    """The first `x-request-id`, if it is fit for headers and logs."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _REQUEST_ID.fullmatch(text) else None
    return None


# What the request that is being answered, if one is, is told


def note_submitted(model: str, handles: Sequence[RequestHandle], each: int) -> None:
    if (record := CURRENT.get()) is not None:
        record.submitted.append(Submitted(model, tuple(handles), each))


def note_body(body: bytes) -> None:
    record = CURRENT.get()
    if record is not None and record.keeps_body:
        record.body = body[:MOST_BODY]


def note_error(error: APIError) -> None:
    if (record := CURRENT.get()) is not None:
        record.refuse(error)
