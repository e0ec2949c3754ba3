"""Spans of requests, as an exporter in memory gets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from chairlift.engine.events import Finished, FinishReason, Usage
from chairlift.engine.handle import RequestHandle
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import RequestTiming
from chairlift.server.cli.app import run
from chairlift.server.observe.record import RequestRecord, Submitted
from chairlift.server.observe.traces import Tracing, TracingFault, is_asked_for, start_tracing
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import CHAT, MODEL, Lift, chat_body, lift
from tests.server.observe.reading import LOGGING, request_lines

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "the moon is made of cheese"


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.kind is SpanKind.SERVER]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        context = parent.get_span_context()
        return [
            span for span in self.all if span.parent and context and span.parent.span_id == context.span_id
        ]


@asynccontextmanager
async def traced(runner: FakeRunner | None = None) -> AsyncIterator[tuple[Lift, Spans]]:
    spans = Spans()
    runner = runner or FakeRunner(answering("abc"))
    async with lift(runner, settings=LOGGING, tracing=spans.tracing) as server:
        yield server, spans


async def test_a_chat_and_what_it_is_made_of() -> None:
    async with traced() as (server, spans):
        asked = {"temperature": 0.5, "top_p": 0.9, "seed": 2**64 - 1, "max_tokens": 9, "n": 2}
        answer = await server.chat(messages=[{"role": "user", "content": SECRET}], **asked)
    (span,) = spans.requests
    usage = answer.json()["usage"]
    assert span.name == f"chat {MODEL}" and span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    seconds = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(seconds, float) and seconds >= 0
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
        "chairlift.request_id": answer.headers["x-request-id"],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": -1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert sorted(child.name for child in spans.below(span)) == sorted(["queue", "prefill", "decode"] * 2)
    assert SECRET not in "".join(one.to_json() for one in spans.all)


@pytest.mark.parametrize("sampled", [True, False])
async def test_a_clients_trace_is_gone_on_with(sampled: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}"}
    async with traced() as (server, spans):
        with request_lines() as seen:
            await server.client.get("/v1/models", headers=headers)
    assert seen.lines[0]["trace_id"] == TRACE
    assert len(spans.all) == sampled
    for span in spans.all:
        assert span.parent is not None and format(span.parent.span_id, "016x") == PARENT
        assert span.name == "GET /v1/models"


@pytest.mark.parametrize("given", ["", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01", "x" * 1000])
async def test_what_is_no_parent_is_none(given: str) -> None:
    async with traced() as (server, spans):
        assert (await server.client.get("/v1/models", headers={"traceparent": given})).status_code == 200
    assert [span.parent for span in spans.all] == [None]


async def test_headers_and_methods_of_a_clients_making_are_in_no_span() -> None:
    secret = "cheese-moon-4711"
    names = (
        "authorization",
        "x-api-key",
        "cookie",
        "user-agent",
        "host",
        "baggage",
        "x-request-id",
        "x-else",
    )
    async with traced() as (server, spans):
        headers = dict.fromkeys(names, f"<{secret}>")
        assert (await server.client.post(CHAT, json=chat_body(), headers=headers)).status_code == 200
        await server.client.request(secret, f"/{secret}", params={secret: secret}, headers=headers)
    assert [span.name for span in spans.requests] == [f"chat {MODEL}", "HTTP"]
    assert dict(spans.requests[1].attributes or {})["http.request.method"] == "_OTHER"
    assert secret not in "".join(one.to_json() for one in spans.all).lower()


async def test_what_fails_and_what_is_refused() -> None:
    runner = FakeRunner(answering("abc"))
    async with traced(runner) as (server, spans):
        await server.chat(temperature=SECRET)
        await server.client.get(f"/{SECRET}")
        for stream in (False, True):
            runner.fail_next(Fault(fail=all_rows))
            await server.chat(stream=stream)
        await server.client.get("/health")
    told = [
        (span.name, span.status.status_code, dict(span.attributes or {}).get("error.type"))
        for span in spans.requests
    ]
    assert told == [
        ("POST /v1/chat/completions", StatusCode.UNSET, None),
        ("GET", StatusCode.UNSET, None),
        (f"chat {MODEL}", StatusCode.ERROR, "engine_error"),
        (f"chat {MODEL}", StatusCode.ERROR, "engine_error"),
    ]
    assert SECRET not in "".join(one.to_json() for one in spans.all)


def record_of(timing: RequestTiming, end: Finished) -> RequestRecord:
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    record = RequestRecord(scope, started=100.0, started_ns=10**18, given_id="id", status=200, complete=True)

    class Ended(RequestHandle):
        def __init__(self) -> None:
            self.request = Request("chatcmpl-1", (1, 2), SamplingParams())
            self.timing = timing

        outcome = end
        ended = True

        def __del__(self) -> None:
            pass

    record.submitted.append(Submitted(MODEL, (Ended(),), 1))
    record.ended = 110.0
    return record


def spent(span: ReadableSpan) -> tuple[float, float]:
    """Seconds since the request's arrival."""
    assert span.start_time is not None and span.end_time is not None
    return (span.start_time - 10**18) / 1e9, (span.end_time - 10**18) / 1e9


def test_times() -> None:
    spans = Spans()
    timing = RequestTiming(100.5, admitted=102.0, first_token=105.0, last_token=109.0, finished=109.25)
    spans.tracing.report(record_of(timing, Finished(FinishReason.LENGTH, Usage(2, 5))))
    (span,) = spans.requests
    assert spent(span) == (0, 10)
    times = {child.name: spent(child) for child in spans.below(span)}
    assert times == {"queue": (0.5, 2), "prefill": (2, 5), "decode": (5, 9)}


def test_times_of_what_did_not_get_far() -> None:
    spans = Spans()
    end = Finished(FinishReason.ABORT, Usage(2, 0))
    spans.tracing.report(record_of(RequestTiming(100.5, finished=103.0), end))
    spans.tracing.report(record_of(RequestTiming(100.5, admitted=102.0, finished=103.0), end))
    first, second = spans.requests
    assert [(child.name, spent(child)) for child in spans.below(first)] == [("queue", (0.5, 3))]
    times = {child.name: spent(child) for child in spans.below(second)}
    assert times == {"queue": (0.5, 2), "prefill": (2, 3)}


def test_an_answer_in_the_background_outlasts_its_request() -> None:
    spans = Spans()
    timing = RequestTiming(100.5, admitted=101.0, first_token=102.0, last_token=130.0, finished=131.0)
    spans.tracing.report(record_of(timing, Finished(FinishReason.STOP, Usage(2, 5))))
    assert spent(spans.requests[0]) == (0, 31)


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """URL, and what comes: paths and bodies."""
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_leave_by_http(path: str) -> None:
    with collector() as (url, got):
        tracing = start_tracing(url + path, {})
        async with lift(FakeRunner(answering("abc")), tracing=tracing) as server:
            await server.chat()
        tracing.close()
    ((sent_to, body),) = got
    assert sent_to == "/v1/traces"
    (spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {item.key: item.value.string_value for item in spans.resource.attributes}
    assert service["service.name"] == "chairlift"
    assert f"chat {MODEL}" in {span.name for scope in spans.scope_spans for span in scope.spans}


@pytest.mark.parametrize(
    ("endpoint", "environment", "asked"),
    [
        (None, {}, False),
        ("http://a", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_traces_are_sent_only_if_asked(
    endpoint: str | None, environment: dict[str, str], asked: bool
) -> None:
    assert is_asked_for(endpoint, environment) is asked


def test_another_protocol_is_refused() -> None:
    with pytest.raises(TracingFault, match="grpc is not supported"):
        start_tracing("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_without_the_library_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setattr("chairlift.server.cli.serve.set_up_logging", lambda *args, **settings: None)
    arguments = ["serve", "--config", "/dev/null", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:9"]
    assert run(arguments) == 1
    assert (
        capsys.readouterr().err == "chairlift: Traces need the extra otel: pip install 'chairlift[otel]'.\n"
    )
