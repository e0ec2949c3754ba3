"""One stream, with times from a clock that only the fake server moves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from chairlift.server.bench.client import Measured, events, stream_chat


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class TimedStream(httpx.AsyncByteStream):
    """Network reads at given times: moves the clock, then hands out the bytes."""

    def __init__(self, clock: FakeClock, reads: list[tuple[float, bytes | Exception]]) -> None:
        self._clock = clock
        self._reads = reads

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at, what in self._reads:
            self._clock.now = at
            if isinstance(what, Exception):
                raise what
            yield what


def sse(**chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def content(text: str, finish: str | None = None) -> bytes:
    return sse(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
ROLE = sse(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])


async def measure(
    *reads: tuple[float, bytes | Exception], status: int = 200, sent: list[httpx.Request] | None = None
) -> Measured:
    clock = FakeClock()

    async def answer(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(request)
        return httpx.Response(status, stream=TimedStream(clock, list(reads)))

    async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer)) as client:
        return await stream_chat(
            client,
            [{"role": "user", "content": "hi"}],
            model="tiny",
            max_tokens=9,
            kind="short",
            clock=clock,
        )


async def test_times_and_counts() -> None:
    measured = await measure(
        (100.5, ROLE),
        (101.0, content("a")),
        (101.25, content("b") + content("c")),  # two chunks in one read
        (103.25, content("")),  # nothing in it: no token for the reader
        (104.25, content("d")),
        (104.5, sse(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])),
        (
            105.0,
            sse(
                choices=[],
                usage={
                    "prompt_tokens": 11,
                    "completion_tokens": 6,
                    "prompt_tokens_details": {"cached_tokens": 8},
                },
            ),
        ),
        (106.0, DONE),
    )
    assert measured.error is None
    assert measured.text == "abcd"
    assert measured.ttft == 1.0
    assert measured.gaps == [0.25, 0.0, 3.0]
    assert measured.e2e == 6.0
    assert measured.finish_reason == "length"
    assert (measured.prompt_tokens, measured.completion_tokens, measured.cached_tokens) == (11, 6, 8)
    assert measured.seconds_per_token == pytest.approx(3.25 / 5)


async def test_what_is_sent() -> None:
    sent: list[httpx.Request] = []
    await measure((101.0, content("a", "stop")), (101.0, DONE), sent=sent)
    assert str(sent[0].url) == "http://server/v1/chat/completions"
    assert json.loads(sent[0].content) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_reasoning_and_tool_calls_are_content() -> None:
    measured = await measure(
        (101.0, sse(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])),
        (
            102.0,
            sse(
                choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}]
            ),
        ),
        (102.0, DONE),
    )
    assert measured.gaps == [1.0]
    assert measured.text == ""


async def test_finish_reason_without_done_is_an_end() -> None:
    measured = await measure((101.0, content("a", "stop")))
    assert measured.error is None
    assert measured.completion_tokens is None


@pytest.mark.parametrize(
    ("last", "kind", "detail"),
    [
        (b"", "truncated stream", "The stream ended with neither a finish_reason nor [DONE]."),
        (b"data: {oops\n\n", "bad chunk", "A chunk is no JSON: {oops"),
        (b"data: [1]\n\n", "bad chunk", "A chunk is no JSON object: [1]"),
        (sse(error={"message": "The step failed.", "code": None}), "error event", "The step failed."),
        (httpx.ReadError("reset by peer"), "connection", "reset by peer"),
        (httpx.ReadTimeout("no byte"), "timeout", "no byte"),
        (httpx.RemoteProtocolError("cut off"), "protocol", "cut off"),
    ],
)
async def test_a_broken_stream(last: bytes | Exception, kind: str, detail: str) -> None:
    measured = await measure((101.0, content("a")), (103.0, last))
    assert (measured.error, measured.detail) == (kind, detail)
    assert measured.text == "a"
    assert measured.e2e == 3.0


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (429, b'{"error": {"message": "The queue is full."}}', "The queue is full."),
        (404, b'{"error": "no such\\nmodel"}', "no such model"),
        (500, b"<html>Internal</html>", "<html>Internal</html>"),
        (503, b"", "no message"),
    ],
)
async def test_a_refusal(status: int, body: bytes, detail: str) -> None:
    measured = await measure((101.0, body), status=status)
    assert measured.error == f"HTTP {status}"
    assert measured.detail == detail
    assert measured.ttft is None


async def test_events_across_reads_and_line_ends() -> None:
    clock = FakeClock()
    reads: list[tuple[float, bytes | Exception]] = [
        (1.0, b": a comment\r\ndata: on"),
        (2.0, b"e\r\n\r\nevent: ping\ndata:two\n"),
        (3.0, b"\n\n\nid: 4\n\n"),
        (4.0, "data: a\u2028b\x85c ü\ndata: d\n\n".encode()),
        (5.0, b"data: never ended"),
    ]
    got = [event async for event in events(TimedStream(clock, reads).__aiter__(), clock)]
    assert got == [(2.0, "one"), (3.0, "two"), (4.0, "a\u2028b\x85c ü\nd")]
