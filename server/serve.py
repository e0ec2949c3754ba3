"""A whole server: find the model, load it, serve it, and leave in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineError
from chairlift.server.app import create_app
from chairlift.server.connection import Connection
from chairlift.server.descriptors import Complaints, raise_limit
from chairlift.server.metrics import ServerMetrics
from chairlift.server.responses.database import StoreFault
from chairlift.server.served import EmbeddingServing, ServeOptions, Serving
from chairlift.server.settings import ServerSettings
from chairlift.server.sources import embedding_factory, find_models, generation_factory

__all__ = [
    "EmbeddingServing",
    "EngineConfig",
    "ServeOptions",
    "ServerSettings",
    "Serving",
    "run_server",
    "serve_engine",
]

logger = logging.getLogger("chairlift.server")

FLUSH_S = 5
"""Seconds that connections get, after the drain, to send what their answers ended with."""
BACKLOG = 2048


Announce = Callable[[Serving | EmbeddingServing], None]
Complain = Callable[[str], None]


def run_server(options: ServeOptions, announce: Announce, complain: Complain) -> int:
    """Serve until a signal to stop; returns the exit code. Blocks; on the main thread only.

    Args:
        announce: called for each model, once all answer.
        complain: called with one line, before an exit code other than 0.
    """
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        complain(f"Cannot listen on {options.host}:{options.port}: {error.strerror or error}.")
        return 1
    with listener:
        try:
            with _stop_signals_interrupt():
                source, embedding = find_models(options)
        except KeyboardInterrupt:
            return 0
        except EngineError as error:
            complain(error.message)
            return 1
        name = source.served_name if source is not None else embedding.served_name if embedding else ""
        metrics = ServerMetrics(name)
        engine = embedder = None
        if source is not None:
            engine = Engine(generation_factory(options, source), options.engine, observer=metrics)
        if embedding is not None:
            embedder = EmbeddingEngine(embedding_factory(options, embedding))
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
                embedder=embedder,
            )
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: OSError where the address is taken, unknown or not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


async def serve_engine(
    engine: Engine | None,
    listener: socket.socket,
    announce: Announce,
    complain: Complain,
    *,
    metrics: ServerMetrics,
    settings: ServerSettings,
    drain_timeout: float,
    access_log: bool = False,
    embedder: EmbeddingEngine | None = None,
) -> int:
    """Serve engines that are not started yet, one or both; returns the exit code.

    Requests are answered from the first moment on: with 503 while the model loads, and again, after the first
    signal, while running answers finish. A second signal ends the process at once.
    """
    raise_limit()
    asyncio.get_running_loop().set_exception_handler(Complaints())
    stop = _install_signals()
    app = create_app(engine, settings, metrics, embedder)
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
    loading = asyncio.create_task(_start(engine, embedder))
    await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A load cannot be interrupted, and nobody waits for an answer yet.
        _end_process(0 if stopping.done() else 1)
    code = 0
    if (error := loading.exception()) is not None:
        code = 1
        complain(_one_line(error))
    else:
        _tell(announce, _url(listener), engine, embedder)
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        await _stop(engine, embedder, drain_timeout)
    server.exit()
    await asyncio.wait({serving}, timeout=FLUSH_S)
    server.cut()
    await serving
    stopping.cancel()
    await responses.close()
    if any(served.wedged for served in (engine, embedder) if served is not None):
        complain("The model does not come back from a step; it is left behind.")
        _end_process(1)
    return code


async def _start(engine: Engine | None, embedder: EmbeddingEngine | None) -> None:
    """Raises: EngineError: a model could not be loaded; neither is left running."""
    if engine is not None:
        await engine.start()
    if embedder is not None:
        try:
            await embedder.start(beside=engine)
        except EngineError:
            await _stop(engine, embedder, 0.0)
            raise


async def _stop(engine: Engine | None, embedder: EmbeddingEngine | None, drain_timeout: float) -> None:
    """An engine stops the embedding engine beside it, whose thread is its own."""
    if engine is not None:
        await engine.stop(drain_timeout)
    elif embedder is not None:
        await embedder.stop(drain_timeout)


def _tell(announce: Announce, url: str, engine: Engine | None, embedder: EmbeddingEngine | None) -> None:
    if engine is not None:
        chats = engine.tokenizer.has_chat_template
        announce(Serving(url, engine.info, engine.stats().runner, engine.config, chats))
    if embedder is not None:
        announce(EmbeddingServing(url, embedder.info))


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
