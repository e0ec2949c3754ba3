"""Outermost of an app: begins and ends the record of every request, and sees to its id."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.metrics import ServerMetrics
from chairlift.server.observe.record import CURRENT, RequestRecord, begin_record

logger = logging.getLogger("chairlift.server")

Report = Callable[[RequestRecord], None]


class Observation:
    """
    Args:
        metrics: told when a request ends, and when its answers have.
        reports: told once both have, in this order.
        keeps_body: records hold what was asked.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, reports: Sequence[Report], *, keeps_body: bool
    ) -> None:
        self.app = app
        self._metrics = metrics
        self._reports = (self._count, *reports)
        self._keeps_body = keeps_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = begin_record(scope, keeps_body=self._keeps_body)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                _begin_answer(record, message)
            elif not message.get("more_body", False):
                record.complete = True
            await send(message)

        token = CURRENT.set(record)
        self._metrics.http.open.inc()
        try:
            await self.app(scope, receive, watched)
        except Exception:
            record.error = record.error or "internal_error"
            raise
        finally:
            self._end(record)
            CURRENT.reset(token)

    def _end(self, record: RequestRecord) -> None:
        record.ended = time.monotonic()
        http = self._metrics.http
        http.open.dec()
        left = record.abandoned or record.status == 499
        http.ended(record.route, record.method, record.status, record.ended - record.started, left=left)
        if record.error is not None:
            http.refused(record.error)
        record.when_done(self._report)

    def _report(self, record: RequestRecord) -> None:
        for report in self._reports:
            try:
                report(record)
            except Exception:  # nobody's answer depends on it
                logger.exception("a request could not be reported")
        # Contexts of timers outlive the request, and with the record they would hold images and tokens.
        record.submitted.clear()
        record.body = None

    def _count(self, record: RequestRecord) -> None:
        for submitted in record.submitted:
            model = self._metrics.model(submitted.model)
            for handles in submitted.prompts:
                sizes = [end.usage.completion_tokens for handle in handles if (end := handle.outcome)]
                model.on_answered(len(handles), max(sizes, default=0))


def _begin_answer(record: RequestRecord, message: Message) -> None:
    """Notes the status, and puts the request's id into `X-Request-Id`: the client's own, else what the route
    put there, else ours."""
    record.status = message["status"]
    headers = []
    for name, value in message.get("headers", ()):
        lower = name.lower()
        if lower == b"x-request-id":
            record.answer_id = value.decode("latin-1")
            continue
        if lower == b"content-type":
            record.streamed = value.startswith(b"text/event-stream")
        headers.append((name, value))
    shown = record.given_id or record.answer_id or record.request_id
    message["headers"] = [*headers, (b"x-request-id", shown.encode("latin-1"))]
