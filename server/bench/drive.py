"""Sends the workloads and collects what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from time import perf_counter

import httpx

from chairlift.server.bench import workloads
from chairlift.server.bench.client import Clock, Measured, Message, stream_chat
from chairlift.server.bench.options import BenchError, BenchOptions, Workload
from chairlift.server.bench.report import BenchReport, summarize

Sleep = Callable[[float], Awaitable[None]]
OnDone = Callable[[Workload, Measured], None]

NO_ANSWER = "I have no answer to that."
"""Stands for an empty answer in the next turn: some templates refuse an empty message."""


def run_bench(
    options: BenchOptions,
    *,
    on_done: OnDone | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Clock = perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> BenchReport:
    """Measure `options.workload` and block until done; `bench` is the same for an event loop.

    Args:
        on_done: called after each request, for a progress display.
        transport, clock, sleep: replaced in tests.

    Raises:
        BenchError: the server cannot be reached, or names no model.
    """
    return asyncio.run(bench(options, on_done=on_done, transport=transport, clock=clock, sleep=sleep))


async def bench(
    options: BenchOptions,
    *,
    on_done: OnDone | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Clock = perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> BenchReport:
    """`run_bench` on the running event loop."""
    driver = _Driver(options, on_done or (lambda workload, measured: None), clock, sleep)
    return await driver.run(transport)


class _Driver:
    """One run against one server. Everything happens on one event loop."""

    def __init__(self, options: BenchOptions, on_done: OnDone, clock: Clock, sleep: Sleep) -> None:
        self._options = options
        self._on_done = on_done
        self._clock = clock
        self._sleep = sleep

    async def run(self, transport: httpx.AsyncBaseTransport | None) -> BenchReport:
        options = self._options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        async with httpx.AsyncClient(
            base_url=options.url,
            headers=headers,
            timeout=httpx.Timeout(options.timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not options.loopback,
            transport=transport,
        ) as client:
            model = await _model_name(client, options)
            await self._warm_up(client, model)
            reports = {}
            for workload in options.workload.parts:
                started = self._clock()
                measured = await self._measure(workload, client, model)
                reports[str(workload)] = summarize(measured, self._clock() - started)
        return BenchReport(
            url=options.url,
            model=model or "",
            seed=options.seed,
            clients=options.clients,
            max_tokens=options.max_tokens,
            rate=options.rate,
            workloads=reports,
        )

    async def _warm_up(self, client: httpx.AsyncClient, model: str | None) -> None:
        """One small request that is not measured: it finds a server that answers nothing, and takes the
        first-time costs (loading, compiling) out of the figures."""
        planned = workloads.warm_up(self._options)
        first = await self._send(client, model, planned, [_user(planned.prompt)])
        if first.error is not None:
            raise BenchError(
                f"{self._options.url} does not answer /v1/chat/completions: {first.error}: {first.detail}"
            )

    async def _measure(
        self, workload: Workload, client: httpx.AsyncClient, model: str | None
    ) -> list[Measured]:
        options = self._options

        async def send_in_turn(queue: list[workloads.Planned]) -> list[Measured]:
            return [await self._send_one(workload, planned, client, model) for planned in queue]

        async def converse(conversation: workloads.Conversation) -> list[Measured]:
            return await self._converse(conversation, client, model)

        if workload is Workload.SOLO:
            return await send_in_turn(workloads.solo(options))
        if workload is Workload.BATCH:
            planned = workloads.batch(options)
            shares = [planned[client_index :: options.clients] for client_index in range(options.clients)]
            return _flat(await asyncio.gather(*map(send_in_turn, shares)))
        if workload is Workload.MIXED:
            return await self._mix(client, model)
        return _flat(await asyncio.gather(*map(converse, workloads.conversations(options))))

    async def _mix(self, client: httpx.AsyncClient, model: str | None) -> list[Measured]:
        planned = workloads.mixed(self._options)
        decoding = _Decoding(sum(each.kind == "short" for each in planned))

        async def send(each: workloads.Planned) -> Measured:
            await self._sleep(each.at)
            if each.kind == "long":
                await decoding.seen()
                return await self._send_one(Workload.MIXED, each, client, model)
            measured = await self._send_one(Workload.MIXED, each, client, model, decoding.started)
            decoding.ended(measured)
            return measured

        return list(await asyncio.gather(*map(send, planned)))

    async def _send_one(
        self,
        workload: Workload,
        planned: workloads.Planned,
        client: httpx.AsyncClient,
        model: str | None,
        on_content: Callable[[], None] | None = None,
    ) -> Measured:
        measured = await self._send(client, model, planned, [_user(planned.prompt)], on_content)
        self._on_done(workload, measured)
        return measured

    async def _converse(
        self, conversation: workloads.Conversation, client: httpx.AsyncClient, model: str | None
    ) -> list[Measured]:
        messages: list[Message] = [{"role": "system", "content": conversation.system}]
        done = []
        for planned in conversation.turns:
            messages.append(_user(planned.prompt))
            measured = await self._send(client, model, planned, messages)
            messages.append({"role": "assistant", "content": measured.text or NO_ANSWER})
            self._on_done(Workload.TURNS, measured)
            done.append(measured)
        return done

    async def _send(
        self,
        client: httpx.AsyncClient,
        model: str | None,
        planned: workloads.Planned,
        messages: list[Message],
        on_content: Callable[[], None] | None = None,
    ) -> Measured:
        return await stream_chat(
            client,
            messages,
            model=model,
            max_tokens=planned.max_tokens,
            kind=planned.kind,
            clock=self._clock,
            on_content=on_content,
        )


class _Decoding:
    """Whether a short request's answer is under way, so that a long prompt can arrive in the middle of it,
    however fast or slow the server is."""

    def __init__(self, shorts: int) -> None:
        self._left = shorts
        self._running = 0
        self._changed = asyncio.Event()

    def started(self) -> None:
        """A short request's first content has arrived."""
        self._running += 1
        self._tell()

    def ended(self, measured: Measured) -> None:
        self._left -= 1
        if measured.chunk_times:
            self._running -= 1
        self._tell()

    async def seen(self) -> None:
        """Until a short answer is under way, or none is left to wait for."""
        while self._left and not self._running:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _model_name(client: httpx.AsyncClient, options: BenchOptions) -> str | None:
    """The model to ask for. Also the first contact, so that an unreachable server is one clear line."""
    try:
        response = await client.get("/v1/models")
    except httpx.ConnectError as error:
        raise BenchError(f"Cannot connect to {options.url}: {_reason(error)}.") from error
    except httpx.TimeoutException as error:
        raise BenchError(f"{options.url} did not answer in time.") from error
    except httpx.HTTPError as error:
        raise BenchError(f"{options.url} does not speak HTTP as expected: {error}.") from error
    if response.status_code in (401, 403):
        raise BenchError(f"{options.url} refuses the API key (HTTP {response.status_code}).")
    if options.model is not None:
        return options.model
    if response.status_code != 200:
        raise BenchError(
            f"{options.url} answers HTTP {response.status_code} to /v1/models: is this the address of an "
            "OpenAI-compatible server? If so, name the model with --model."
        )
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{options.url}/v1/models lists no models in OpenAI's format.") from None
    return names[0] if names else None


def _reason(error: httpx.ConnectError) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    return str(error).rstrip(".") or "no connection"


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _flat(lists: Iterable[list[Measured]]) -> list[Measured]:
    return [measured for each in lists for measured in each]
