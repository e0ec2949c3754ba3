"""The line that the log gets of each request, at its end."""

from __future__ import annotations

import logging

from chairlift.engine.events import FinishReason
from chairlift.server.observe.record import Outcome, RequestRecord

access = logging.getLogger("chairlift.access")

QUIET = ("/health", "/health/ready", "/metrics")
"""Asked for every few seconds by machines: told at level debug, unless something is wrong with the server."""
MOST_PATH = 200
Fields = dict[str, object]


def log_request(record: RequestRecord) -> None:
    outcome = record.outcome
    level = _level(record, outcome)
    if access.isEnabledFor(level):
        access.log(level, "%s", _title(record), extra=fields_of(record, outcome))


def _level(record: RequestRecord, outcome: Outcome | None) -> int:
    failed = outcome is not None and FinishReason.ERROR.value in outcome.finish_reasons
    if record.route in QUIET:
        return logging.DEBUG
    return logging.WARNING if failed or record.status >= 500 or record.status == 0 else logging.INFO


def _title(record: RequestRecord) -> str:
    return f"{record.method} {record.route or _path(record)} {record.status}"


def fields_of(record: RequestRecord, outcome: Outcome | None) -> Fields:
    """What is known; nothing of what was asked, unless the record holds it."""
    path = _path(record)
    total = None if record.ended is None else record.ended - record.started
    fields: Fields = {
        "request_id": record.request_id,
        "answer_id": record.answer_id if record.answer_id != record.request_id else None,
        "trace_id": record.trace_id,
        "method": record.method,
        "route": record.route,
        "path": path if path != record.route else None,
        "status": record.status,
        "client": record.client,
        "key": record.key,
        "model": ",".join(record.models) or None,
        "stream": record.streamed or None,
        **(_outcome_fields(record, outcome) if outcome is not None else {}),
        "total_s": _rounded(total),
        "disconnected": record.abandoned or record.status == 499 or None,
        "error": record.error,
        "error_param": record.error_param,
        "error_message": record.error_message or (outcome.error if outcome is not None else None),
        "body": record.body.decode("utf-8", "replace") if record.body is not None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _outcome_fields(record: RequestRecord, outcome: Outcome) -> Fields:
    answers = len(record.handles)
    return {
        "answers": answers if answers > 1 else None,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "queue_s": _rounded(outcome.queue_s),
        "ttft_s": _rounded(outcome.first_token_s),
        "itl_s": _rounded(outcome.interval_s),
        "finish_reason": ",".join(outcome.finish_reasons) or None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _path(record: RequestRecord) -> str:
    """Without the query, which may hold anything; what is no printable ASCII is escaped."""
    return record.path[:MOST_PATH].encode("unicode_escape").decode("ascii")
