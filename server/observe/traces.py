"""OpenTelemetry's traces: a span for each request, with its queueing, prefill and decode below it.

Spans are made when a request has ended, of the times that are known then, so that nothing is done per token.
The library comes with the extra `otel`.

Sources: OpenTelemetry's semantic conventions for generative AI (spans) and for HTTP (servers), and its
environment variables; W3C Trace Context.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from chairlift.engine.events import FinishReason
from chairlift.engine.handle import RequestHandle
from chairlift.server.metrics.http import METHODS
from chairlift.server.observe.record import Outcome, RequestRecord
from chairlift.server.observe.request_line import QUIET

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

logger = logging.getLogger("chairlift.server")

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
TRACES_PATH = "/v1/traces"
FLUSH_S = 5.0
"""Seconds that spans get to leave when the server stops."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""By route: `gen_ai.operation.name`."""
Value = str | bool | int | float | Sequence[str]


class TracingFault(Exception):
    """Traces cannot be sent as asked; the message is for the operator."""


class Tracing:
    """Args: provider: whose processors spans go to."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("chairlift", version("chairlift"))
        self._propagator = TraceContextTextMapPropagator()

    def report(self, record: RequestRecord) -> None:
        """The spans of a request that has ended."""
        if record.route in QUIET:
            return
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        clock, outcome = _Clock(record), record.outcome
        span = self._tracer.start_span(
            _name(record),
            context=self._parent(record),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record, outcome),
            start_time=record.started_ns,
        )
        record.trace_id = format(span.get_span_context().trace_id, "032x")
        if (error := _error_of(record, outcome)) is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        ends = [record.ended or record.started]
        context = set_span_in_context(span)
        for handle in record.handles:
            ends.append(self._phases(handle, context, clock))
        span.end(clock.ns(max(ends)))

    def close(self) -> None:
        """Sends what has not been sent; waits no longer than `FLUSH_S`."""
        closing = threading.Thread(target=self._provider.shutdown, name="chairlift traces", daemon=True)
        closing.start()
        closing.join(FLUSH_S)

    def _parent(self, record: RequestRecord) -> Context:
        headers: dict[str, str] = {}
        for name, value in record.scope["headers"]:
            if name in (b"traceparent", b"tracestate"):
                headers.setdefault(name.decode(), value.decode("latin-1"))
        return self._propagator.extract(headers)

    def _phases(self, handle: RequestHandle, context: Context, clock: _Clock) -> float:
        """Spans of one answer, as far as it got. Returns when the last ends."""
        timing = handle.timing
        moments = [timing.queued, timing.admitted, timing.first_token, timing.last_token]
        end = timing.finished or timing.queued
        for name, start, stop in zip(("queue", "prefill", "decode"), moments[:-1], moments[1:], strict=True):
            if start is None:
                break
            span = self._tracer.start_span(
                name,
                context=context,
                attributes={"gen_ai.response.id": handle.request.request_id},
                start_time=clock.ns(start),
            )
            span.end(clock.ns(end if stop is None else stop))
        return end


class _Clock:
    """Moments of the monotonic clock, in nanoseconds since 1970."""

    def __init__(self, record: RequestRecord) -> None:
        self._started, self._started_ns = record.started, record.started_ns

    def ns(self, moment: float) -> int:
        return self._started_ns + round((moment - self._started) * 1e9)


def _name(record: RequestRecord) -> str:
    operation = OPERATIONS.get(record.route or "")
    if operation is not None and record.models:
        return f"{operation} {record.models[0]}"
    method = record.method if record.method in METHODS else "HTTP"
    return f"{method} {record.route}" if record.route is not None else method


def attributes_of(record: RequestRecord, outcome: Outcome | None) -> dict[str, Value]:
    """Nothing of what was asked or answered, and of headers the client's id of the request alone."""
    found: dict[str, Value | None] = {
        "http.request.method": record.method if record.method in METHODS else "_OTHER",
        "http.route": record.route,
        "http.response.status_code": record.status or None,
        "client.address": record.client,
        "gen_ai.operation.name": OPERATIONS.get(record.route or ""),
        "gen_ai.provider.name": "chairlift" if record.route in OPERATIONS else None,
        "error.type": _error_of(record, outcome),
        "chairlift.request_id": record.request_id,
        "chairlift.disconnected": record.abandoned or record.status == 499 or None,
    }
    if outcome is not None:
        found |= _generation(record, outcome)
    return {name: value for name, value in found.items() if value is not None}


def _generation(record: RequestRecord, outcome: Outcome) -> dict[str, Value | None]:
    submitted = record.submitted[0]
    request = submitted.handles[0].request
    sampling = request.sampling
    return {
        "gen_ai.request.model": submitted.model,
        "gen_ai.response.model": submitted.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty) or None,
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty) or None,
        "gen_ai.request.seed": _signed(sampling.seed),
        "gen_ai.request.choice.count": submitted.each if submitted.each > 1 else None,
        "gen_ai.request.stream": record.streamed,
        "gen_ai.response.finish_reasons": outcome.finish_reasons,
        "gen_ai.response.time_to_first_chunk": outcome.first_token_s,
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
    }


def _signed(seed: int | None) -> int | None:
    """Within 64 bits with a sign, which is all that the protocol has."""
    return None if seed is None else seed - 2**64 if seed >= 2**63 else seed


def _error_of(record: RequestRecord, outcome: Outcome | None) -> str | None:
    """For a server's span, what is the client's doing is no error."""
    if record.status >= 500 or not record.status:
        return record.error or str(record.status)
    failed = outcome is not None and FinishReason.ERROR.value in outcome.finish_reasons
    return (record.error or "engine_error") if failed else None


def is_asked_for(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """By the operator's setting, or by OpenTelemetry's own variables."""
    return endpoint is not None or any(environment.get(name) for name in VARIABLES)


def start_tracing(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Tracing:
    """Spans go to the OTLP endpoint, by HTTP, in batches and from a thread of their own.

    Args:
        endpoint: a base URL, `/v1/traces` is added as OpenTelemetry does; None takes its variables.

    Raises:
        TracingFault: the library is not installed, or another protocol is asked for.
    """
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), None)
    if protocol not in (None, "http/protobuf"):
        raise TracingFault(f"Traces are sent by http/protobuf; {protocol} is not supported.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise TracingFault("Traces need the extra otel: pip install 'chairlift[otel]'.") from None
    if endpoint is not None and not endpoint.rstrip("/").endswith(TRACES_PATH):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    service = {"service.name": "chairlift", "service.version": version("chairlift")}
    resource = Resource.create(service).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
