"""The verdicts of `python -m tests.faults.load` and how it reads answers, by hand; and a moment of it."""

from __future__ import annotations

import json

import pytest

from tests.fakes import FakeRunner
from tests.faults.exchange import Reply, letters_after, reply_of
from tests.faults.fake_server import Options, fake_serving
from tests.faults.load import MIB, load, memory_of
from tests.server.harness import COMPLETIONS, completion_body, lift

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
GOOD = b'data: {"choices": [{"index": 0, "text": "ab"}]}\n\n'
DONE = b"data: [DONE]\n\n"
FAULT = b'event: error\ndata: {"error": {"code": "unavailable"}}\n\n'
LAST = b"0\r\n\r\n"
STOP = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
FAILED = b'data: {"type": "response.failed", "response": {"error": {"code": "server_error"}}}\n\n'
THEIRS = b'event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n'
REFUSED = json.dumps({"error": {"code": "queue_full"}}).encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize(
    ("received", "end"),
    [
        (b"", "unanswered"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "unanswered"),
        (STREAM, "cut"),
        (STREAM + chunk(GOOD), "cut"),
        (STREAM + chunk(GOOD) + chunk(DONE), "cut"),
        (STREAM + chunk(GOOD) + LAST, "cut"),
        (STREAM + chunk(GOOD) + chunk(DONE) + LAST, "answered"),
        (STREAM + chunk(GOOD + DONE) + LAST, "answered"),
        (STREAM + chunk(GOOD + DONE) + chunk(b": ping\n\n") + LAST, "answered"),
        (STREAM + chunk(GOOD) + chunk(b": ping\n\n") + LAST, "cut"),
        (STREAM + chunk(GOOD) + chunk(FAULT) + LAST, "unavailable"),
        (STREAM + chunk(STOP) + LAST, "answered"),
        (STREAM + chunk(STOP) + chunk(GOOD) + LAST, "cut"),
        (STREAM + chunk(FAILED) + LAST, "server_error"),
        (STREAM + chunk(GOOD) + chunk(THEIRS) + LAST, "api_error"),
        (b"HTTP/1.1 429 x\r\nContent-Length: %d\r\n\r\n" % len(REFUSED) + REFUSED, "queue_full"),
        (b"HTTP/1.1 429 x\r\nContent-Length: %d\r\n\r\n" % len(REFUSED) + REFUSED[:-1], "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "answered"),
        (b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\n{}", "status 500"),
    ],
)
def test_how_an_answer_ended(received: bytes, end: str) -> None:
    assert reply_of(received).end == end


def test_its_text() -> None:
    other = chunk(GOOD.replace(b'"index": 0', b'"index": 1'))
    assert (
        reply_of(STREAM + chunk(GOOD) + other + chunk(GOOD[:9]) + chunk(GOOD[9:] + DONE) + LAST).text
        == "abab"
    )
    whole = {"choices": [{"message": {"content": "ab"}}]}
    assert Reply(200, json.dumps(whole).encode(), True).text == "ab"


async def test_the_fake_models_letters() -> None:
    async with lift(FakeRunner()) as server:
        body = {**completion_body(), "prompt": "Hello", "max_tokens": 30, "temperature": 0, "n": 1}
        answer = (await server.client.post(COMPLETIONS, json=body)).json()
    assert answer["choices"][0]["text"] == letters_after("Hello", 30)


def test_memory_that_stays_and_memory_that_grows() -> None:
    warming = [(float(second), 50 * MIB + 100_000 * min(second, 20)) for second in range(100)]
    still = memory_of(warming)
    assert still.flat and still.per_minute == 0 and still.start == 50 * MIB
    growing = memory_of([(float(second), 50 * MIB + second * MIB) for second in range(100)])
    assert not growing.flat and growing.per_minute == pytest.approx(60 * MIB)


async def test_a_moment_of_it_goes_well() -> None:
    with fake_serving(Options(seqs=12, step_ms=0.2)) as served:
        work = await load(served, "fake", 1.0, 12, every=0.2)
        served.process.terminate()
        assert (served.exit_code(), served.complaints) == (0, "")
    assert set(work.ends) == {"answered"} and work.wrong == []
    assert work.tokens > 0 and len(work.resident) >= 2
