"""Whole runs against a small server on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chairlift.server.bench import BenchError, BenchOptions, Workload, run_bench
from chairlift.server.bench.client import Measured
from chairlift.server.bench.drive import bench

Answer = Callable[["FakeServer", dict[str, object]], Response]


class HandshakeClock:
    """A clock that the server moves, and only once the client has read it for what was sent before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self.reads += 1
        self._read.set()
        return self.now

    async def advance(self, seconds: float, after_reads: int) -> None:
        while self.reads < after_reads:
            self._read.clear()
            await self._read.wait()
        self.now += seconds


@dataclass
class FakeServer:
    """Answers `/v1/models`, and each completion with `max_tokens` chunks by default."""

    answer: Answer
    models: Response = field(default_factory=lambda: JSONResponse({"data": [{"id": "tiny"}]}))
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
    most_running: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.list_models),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def list_models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        return self.models

    async def complete(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        body = json.loads(await request.body())
        self.bodies.append(body)
        return self.answer(self, body)


def chunk(**what: object) -> str:
    return f"data: {json.dumps(what)}\n\n"


def content(text: str, finish: str | None = None) -> str:
    return chunk(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


def usage(prompt: int, completion: int) -> str:
    return chunk(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = "data: [DONE]\n\n"


def stream_tokens(server: FakeServer, body: dict[str, object]) -> Response:
    async def tokens() -> AsyncIterator[str]:
        server.running += 1
        server.most_running = max(server.most_running, server.running)
        try:
            count = body["max_tokens"]
            assert isinstance(count, int)
            for index in range(count):
                yield content(f"{index} ", "length" if index == count - 1 else None)
            yield usage(10, count) + DONE
        finally:
            server.running -= 1

    return StreamingResponse(tokens(), media_type="text/event-stream")


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        uvicorn_server = uvicorn.Server(uvicorn.Config(server.app(), log_level="critical", lifespan="off"))
        task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            uvicorn_server.should_exit = True
            await task


async def test_times_over_a_socket() -> None:
    clock = HandshakeClock()

    def answer(server: FakeServer, body: dict[str, object]) -> Response:
        if len(server.bodies) == 1:  # the warm-up
            return stream_tokens(server, body)
        before = clock.reads  # the client has read the clock for this request's start

        async def timed() -> AsyncIterator[str]:
            pieces = [content("a"), content("b"), content("c", "length"), usage(10, 3) + DONE]
            for sent, (wait, piece) in enumerate(zip([4.0, 0.5, 2.0, 1.0], pieces, strict=True)):
                await clock.advance(wait, after_reads=before + sent)
                yield piece

        return StreamingResponse(timed(), media_type="text/event-stream")

    async with serving(FakeServer(answer)) as url:
        options = BenchOptions(url, workload=Workload.SOLO, requests=1, max_tokens=3)
        report = await bench(options, clock=clock)
    solo = report.workloads["solo"]
    assert solo.ttft_s is not None and solo.ttft_s.max == 4.0
    assert solo.itl_s is not None and (solo.itl_s.p50, solo.itl_s.max) == (1.25, 2.0)
    assert solo.tpot_s is not None and solo.tpot_s.max == 1.25
    assert solo.wall_s == 7.5
    assert solo.output_tokens_per_s == pytest.approx(3 / 7.5)


async def test_every_workload() -> None:
    server = FakeServer(stream_tokens)
    seen: list[tuple[Workload, Measured]] = []
    arrivals: list[float] = []

    async def sleep(seconds: float) -> None:
        arrivals.append(seconds)

    async with serving(server) as url:
        options = BenchOptions(url + "/v1", clients=3, max_tokens=4, api_key="secret")
        report = await bench(options, on_done=lambda *what: seen.append(what), sleep=sleep)
    assert report.ok
    assert report.model == "tiny"
    assert list(report.workloads) == ["solo", "batch", "mixed", "turns"]
    assert [each.requests for each in report.workloads.values()] == [4, 6, 16, 9]
    assert [each.completion_tokens for each in report.workloads.values()][:2] == [16, 24]
    assert len(seen) == 35
    assert len(arrivals) == 16
    assert len(server.bodies) == 36  # and the warm-up
    assert {body["model"] for body in server.bodies} == {"tiny"}
    assert server.keys == {"Bearer secret"}
    assert report.workloads["batch"].notes == []


async def test_batch_has_all_clients_in_flight() -> None:
    everyone = asyncio.Event()

    def answer(server: FakeServer, body: dict[str, object]) -> Response:
        if len(server.bodies) == 1:
            return stream_tokens(server, body)

        async def wait_for_all() -> AsyncIterator[str]:
            server.running += 1
            if server.running == 3:
                everyone.set()
            await everyone.wait()  # for ever, were fewer than three at once
            yield content("a", "length") + DONE

        return StreamingResponse(wait_for_all(), media_type="text/event-stream")

    async with serving(FakeServer(answer)) as url:
        report = await bench(BenchOptions(url, workload=Workload.BATCH, clients=3, requests=3, max_tokens=1))
    assert report.workloads["batch"].succeeded == 3


async def test_long_prompts_arrive_while_an_answer_is_under_way() -> None:
    long_arrived = asyncio.Event()
    under_way: list[int] = []

    def answer(server: FakeServer, body: dict[str, object]) -> Response:
        if len(server.bodies) == 1:
            return stream_tokens(server, body)
        if len(str(body["messages"])) > 2000:
            under_way.append(server.running)
            long_arrived.set()
            return stream_tokens(server, body)

        async def short() -> AsyncIterator[str]:
            server.running += 1
            yield content("a")
            await long_arrived.wait()  # for ever, were the long prompt held back until all others end
            server.running -= 1
            yield content("b", "length") + DONE

        return StreamingResponse(short(), media_type="text/event-stream")

    async def sleep(seconds: float) -> None:
        """Everything arrives at once."""

    async with serving(FakeServer(answer)) as url:
        options = BenchOptions(url, workload=Workload.MIXED, requests=4, max_tokens=2)
        report = await bench(options, sleep=sleep)
    mixed = report.workloads["mixed"]
    assert mixed.succeeded == 4
    assert [detail.kind for detail in mixed.details] == ["short", "short", "short", "long"]
    assert len(under_way) == 1 and under_way[0] >= 1


async def test_long_prompts_do_not_wait_for_answers_that_never_come() -> None:
    def answer(server: FakeServer, body: dict[str, object]) -> Response:
        if len(server.bodies) == 1 or len(str(body["messages"])) > 2000:
            return stream_tokens(server, body)
        return JSONResponse({"error": {"message": "No."}}, 500)

    async def sleep(seconds: float) -> None:
        """Everything arrives at once."""

    async with serving(FakeServer(answer)) as url:
        options = BenchOptions(url, workload=Workload.MIXED, requests=4, max_tokens=2)
        report = await bench(options, sleep=sleep)
    assert (report.workloads["mixed"].succeeded, report.workloads["mixed"].errors) == (1, {"HTTP 500": 3})


async def test_turns_carry_what_was_said() -> None:
    server = FakeServer(stream_tokens)
    async with serving(server) as url:
        await bench(BenchOptions(url, workload=Workload.TURNS, clients=1, max_tokens=2))
    first, second, third = [body["messages"] for body in server.bodies[1:]]
    assert isinstance(first, list) and isinstance(second, list) and isinstance(third, list)
    assert [message["role"] for message in third] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert second[:2] == first and third[:4] == second
    assert third[2] == {"role": "assistant", "content": "0 1 "}


async def test_failures_are_counted_and_the_run_goes_on() -> None:
    def answer(server: FakeServer, body: dict[str, object]) -> Response:
        if len(server.bodies) % 2:  # the warm-up, and every other one
            return stream_tokens(server, body)
        return JSONResponse({"error": {"message": "The queue is full."}}, 429)

    async with serving(FakeServer(answer)) as url:
        report = await bench(BenchOptions(url, workload=Workload.SOLO, max_tokens=2))
    solo = report.workloads["solo"]
    assert not report.ok
    assert (solo.requests, solo.succeeded, solo.errors) == (4, 2, {"HTTP 429": 2})
    assert solo.notes == ["HTTP 429: The queue is full."]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (JSONResponse({}, 404), "answers HTTP 404 to /v1/models: is this the address"),
        (JSONResponse({}, 401), "refuses the API key"),
        (JSONResponse({}), "lists no models in OpenAI's format"),
        (Response("<html>"), "lists no models in OpenAI's format"),
    ],
)
async def test_what_is_no_such_server(models: Response, message: str) -> None:
    async with serving(FakeServer(stream_tokens, models=models)) as url:
        with pytest.raises(BenchError, match=message) as raised:
            await bench(BenchOptions(url))
    assert "\n" not in str(raised.value)


async def test_a_server_without_a_model_list_needs_a_name() -> None:
    server = FakeServer(stream_tokens, models=JSONResponse({}, 404))
    async with serving(server) as url:
        options = BenchOptions(url, workload=Workload.SOLO, requests=1, max_tokens=1, model="mine")
        report = await bench(options)
    assert report.ok
    assert {body["model"] for body in server.bodies} == {"mine"}


async def test_an_empty_model_list_sends_no_name() -> None:
    server = FakeServer(stream_tokens, models=JSONResponse({"data": []}))
    async with serving(server) as url:
        await bench(BenchOptions(url, workload=Workload.SOLO, requests=1, max_tokens=1))
    assert all("model" not in body for body in server.bodies)


async def test_a_server_that_answers_nothing() -> None:
    def refuse(server: FakeServer, body: dict[str, object]) -> Response:
        return JSONResponse({"error": {"message": "No such model."}}, 404)

    async with serving(FakeServer(refuse)) as url:
        with pytest.raises(
            BenchError, match="does not answer /v1/chat/completions: HTTP 404: No such model."
        ):
            await bench(BenchOptions(url))


def test_refused_connection() -> None:
    with socket.socket() as unused:  # bound but not listening: nobody else can take the port
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BenchError, match=f"^Cannot connect to {url}: connection refused.$"):
            run_bench(BenchOptions(url))
