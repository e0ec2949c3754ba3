"""A whole server: find the model, load it, serve it, and leave in good order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineError
from chairlift.engine.plan import ModelInfo, RunnerStats
from chairlift.server.app import create_app
from chairlift.server.connection import Connection
from chairlift.server.descriptors import Complaints, raise_limit
from chairlift.server.metrics import ServerMetrics
from chairlift.server.responses.database import StoreFault
from chairlift.server.settings import ServerSettings

__all__ = ["EngineConfig", "ServeOptions", "ServerSettings", "Serving", "run_server", "serve_engine"]

logger = logging.getLogger("chairlift.server")

FLUSH_S = 5
"""Seconds that connections get, after the drain, to send what their answers ended with."""
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ServeOptions:
    model: str | None = None
    """A folder, a GGUF file or a name on the hub; None is the embedded default."""
    served_name: str | None = None
    """What clients write in `model`; None is the folder's or the repository's name."""
    dtype: str | None = None
    """Number format of the weights; None leaves it to the device."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None is the model's own context."""
    kv_cache_dtype: str = "auto"
    """Type that keys and values are kept in: the model's own, int8 or int4."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    drain_timeout: float = 30.0
    """Seconds that running answers get to finish after a signal to stop."""
    access_log: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served and where, for whoever tells the operator."""

    url: str
    info: ModelInfo
    memory: RunnerStats
    config: EngineConfig
    has_chat_template: bool

    @property
    def curl(self) -> str:
        """A shell command that works as it stands, and gets a short answer of the most probable tokens: small
        models ramble at the default temperature."""
        question = "What is the capital of France?"
        body: dict[str, object] = {"model": self.info.name, "temperature": 0}
        if self.has_chat_template:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question}]
        else:
            path, body["prompt"] = "/v1/completions", question
        body["max_tokens"] = 100
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl {self.url}{path} -H 'Content-Type: application/json' -d {data}"


Announce = Callable[[Serving], None]
Complain = Callable[[str], None]


def run_server(options: ServeOptions, announce: Announce, complain: Complain) -> int:
    """Serve until a signal to stop; returns the exit code. Blocks; on the main thread only.

    Args:
        announce: called once the model answers.
        complain: called with one line, before an exit code other than 0.
    """
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        complain(f"Cannot listen on {options.host}:{options.port}: {error.strerror or error}.")
        return 1
    with listener:
        from chairlift.engine.models.loader import load_model  # imports mlx, which takes seconds
        from chairlift.engine.models.resolve import resolve_model

        try:
            with _stop_signals_interrupt():
                source = resolve_model(options.model, served_name=options.served_name, dtype=options.dtype)
        except KeyboardInterrupt:
            return 0
        except EngineError as error:
            complain(error.message)
            return 1
        metrics = ServerMetrics(source.served_name)
        factory = functools.partial(
            load_model,
            source.folder,
            source.served_name,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        engine = Engine(factory, options.engine, observer=metrics)
        return asyncio.run(
            serve_engine(
                engine,
                listener,
                announce,
                complain,
                metrics=metrics,
                settings=options.settings,
                drain_timeout=options.drain_timeout,
                access_log=options.access_log,
            )
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: OSError where the address is taken, unknown or not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


async def serve_engine(
    engine: Engine,
    listener: socket.socket,
    announce: Announce,
    complain: Complain,
    *,
    metrics: ServerMetrics,
    settings: ServerSettings,
    drain_timeout: float,
    access_log: bool = False,
) -> int:
    """Serve an engine that is not started yet; returns the exit code.

    Requests are answered from the first moment on: with 503 while the model loads, and again, after the first
    signal, while running answers finish. A second signal ends the process at once.
    """
    raise_limit()
    asyncio.get_running_loop().set_exception_handler(Complaints())
    stop = _install_signals()
    app = create_app(engine, settings, metrics)
    responses = app.state.context.responses
    try:
        await responses.store.open()
    except StoreFault as fault:
        await responses.close()
        complain(str(fault))
        return 1
    server = _Server(_uvicorn_config(app, access_log))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(engine.start())
    await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A load cannot be interrupted, and nobody waits for an answer yet.
        _end_process(0 if stopping.done() else 1)
    code = 0
    if (error := loading.exception()) is not None:
        code = 1
        complain(_one_line(error))
    else:
        announce(Serving(_url(listener), engine.info, engine.stats().runner, engine.config, _chats(engine)))
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        await engine.stop(drain_timeout)
    server.exit()
    await asyncio.wait({serving}, timeout=FLUSH_S)
    server.cut()
    await serving
    stopping.cancel()
    await responses.close()
    if engine.wedged:
        complain("The model does not come back from a step; it is left behind.")
        _end_process(1)
    return code


def _chats(engine: Engine) -> bool:
    return engine.tokenizer.has_chat_template


def _one_line(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return error.message
    logger.error("loading failed", exc_info=error)
    return f"The model could not be loaded: {type(error).__name__}: {' '.join(str(error).split())}"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _stop_signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGINT raise KeyboardInterrupt: half-made files are cleaned up on the way out. SIGINT is
    set as well, since a shell starts its background jobs with it ignored."""
    stops = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.default_int_handler) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install_signals() -> asyncio.Event:
    """The event is set by the first SIGTERM or SIGINT; the second ends the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            _end_process(0)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def _end_process(code: int) -> None:
    """Without waiting for the model's thread, which may be in the middle of a step or a load."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _uvicorn_config(app: object, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=2 * FLUSH_S,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would cut running answers off, and without its tick of 0.1 s
    (uvicorn 0.54): it is told to exit. Once a second remains, for the `Date` header."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    def exit(self) -> None:
        """Leave: what was asked in full is answered first, what was asked by half is not waited for."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.cut_half_request()
        self.should_exit = True
        self._exit.set()

    def cut(self) -> None:
        """Give up on clients that do not read what was sent. Upstream would cancel their tasks, and log each
        with a trace."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), 1.0)
