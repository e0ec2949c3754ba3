"""A whole server: find the model, load it, serve it, and leave in good order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import uvicorn

from chairlift.engine.disk import require_disk
from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineError
from chairlift.engine.memory.budget import Budget
from chairlift.server.app import app_of
from chairlift.server.connection import Connection
from chairlift.server.descriptors import Complaints, raise_limit
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.faults import as_fault
from chairlift.server.models.model import Model, Use
from chairlift.server.models.models import Models
from chairlift.server.models.roster import State
from chairlift.server.observe.traces import Tracing, TracingFault, start_tracing
from chairlift.server.responses.database import StoreFault
from chairlift.server.security.keys import KeyFault
from chairlift.server.security.masking import SecretMask, mask_logs
from chairlift.server.security.opening import Exposed, open_safely
from chairlift.server.security.reload import Reload, has_terminal
from chairlift.server.security.settings import ConnectionLimits
from chairlift.server.security.tls import TLSFault, make_context
from chairlift.server.served import EmbeddingServing, ServeOptions, Serving, Standby
from chairlift.server.settings import ServerSettings
from chairlift.server.sources import specs_of, usable_memory

logger = logging.getLogger("chairlift.lifecycle")

FLUSH_S = 5
"""Seconds that connections get, after the drain, to send what their answers ended with."""
BACKLOG = 2048
SWITCH_S = 0.0005
"""Seconds after which a thread that computes hands Python's lock over. The event loop and the MLX threads
take turns many times a token, and at Python's own 5 ms each waits for the other (28 tiny layers on a CPU: 22
tok/s, 26 with this; 8 streams 174 and 187)."""
CREDENTIALS = ' -H "Authorization: Bearer $CHAIRLIFT_API_KEY"'
"""In a shell command; the key itself is not printed."""


Announce = Callable[[Serving | EmbeddingServing | Standby], None]
Complain = Callable[[str], None]


def run_server(options: ServeOptions, announce: Announce, complain: Complain) -> int:
    """Serve until a signal to stop; returns the exit code. Blocks; on the main thread only.

    Args:
        announce: called for each model, once all answer.
        complain: called with one line, before an exit code other than 0.
    """
    observing = options.settings.observe
    try:
        tracing = start_tracing(observing.otlp_endpoint) if observing.traces else None
        security = open_safely(options.host, options.port, options.settings.security)
        listener = listen(options.host, options.port)
    except (TracingFault, Exposed, KeyFault, TLSFault) as fault:
        complain(str(fault))
        return 1
    except OSError as error:
        complain(f"Cannot listen on {options.host}:{options.port}: {error.strerror or error}.")
        return 1
    with listener, closing(tracing) if tracing is not None else nullcontext():
        metrics = ServerMetrics()
        try:
            with _stop_signals_interrupt():
                for model in options.models:
                    if model.use is not Use.EMBEDDING:
                        require_disk(model.engine)  # nothing is fetched before that
                specs = specs_of(options.models, metrics.model)
                limit = options.memory_limit_bytes
                memory = usable_memory() if limit is None else limit
        except KeyboardInterrupt:
            logger.info("told to stop before the models were found")
            return 0
        except EngineError as error:
            complain(error.message)
            return 1
        models = Models(
            specs,
            budget=Budget(memory) if memory else None,
            load_timeout=options.load_timeout,
            drain_timeout=options.drain_timeout,
            max_waiting=max(model.engine.max_waiting for model in options.models),
            watch=functools.partial(watch, metrics),
        )
        sys.setswitchinterval(SWITCH_S)
        return asyncio.run(
            serve_models(
                models,
                listener,
                announce,
                complain,
                metrics=metrics,
                settings=replace(options.settings, security=security),
                drain_timeout=options.drain_timeout,
                watchdog_s=options.watchdog_s,
                tracing=tracing,
            )
        )


def watch(metrics: ServerMetrics, model: Model) -> None:
    """Have the metrics read the engine that a model has now."""
    if model.use is Use.GENERATION:
        metrics.model(model.name).watch(model.engine if isinstance(model.engine, Engine) else None)
    elif isinstance(model.engine, EmbeddingEngine):
        metrics.watch_embedder(model.engine)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: OSError where the address is taken, unknown or not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


async def serve_models(
    models: Models,
    listener: socket.socket,
    announce: Announce,
    complain: Complain,
    *,
    metrics: ServerMetrics,
    settings: ServerSettings,
    drain_timeout: float,
    watchdog_s: float = 0.0,
    tracing: Tracing | None = None,
) -> int:
    """Serve models that are not started yet; returns the exit code.

    Requests are answered from the first moment on: with 503 while the models of the start load, and again,
    after the first signal, while running answers finish. A second signal ends the process at once.
    """
    raise_limit()
    asyncio.get_running_loop().set_exception_handler(Complaints())
    lifecycle = Lifecycle(watchdog_s=watchdog_s, complain=complain)
    stop = _install_signals(lifecycle, models)
    security = settings.security
    try:
        app = app_of(models, settings, metrics, tracing)
        mask = SecretMask()
        mask.learn(given.secret for given in security.keys.given())
        mask_logs(mask)
        tls = (make_context(security.tls), security.tls) if security.tls is not None else None
    except (KeyFault, TLSFault) as fault:
        complain(str(fault))
        return 1
    responses = app.state.context.responses
    try:
        await responses.store.open()
    except StoreFault as fault:
        await responses.close()
        complain(str(fault))
        return 1
    hang_up = partial(_stop_for, signal.SIGHUP.name, stop, models)
    reload = Reload(
        app.state.context.keys, security.keys, tls=tls, mask=mask, hang_up=hang_up, terminal=_terminal()
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    server = _Server(_uvicorn_config(app, security.connection, tls[0] if tls is not None else None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = _url(listener, secure=tls is not None)
    lifecycle.listening(url)
    stopping = asyncio.create_task(stop.wait())
    loading = asyncio.create_task(models.start())
    await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A load cannot be interrupted, and nobody waits for an answer yet.
        lifecycle.end_process(0 if stopping.done() else 1)
    code = 0
    if (error := loading.exception()) is not None:
        code = 1
        complain(as_fault(error, "the models").message)
    else:
        for model, why in models.faults:
            complain(f"{model.name} is not served for now: {why.message}")
        _tell(announce, url, CREDENTIALS if app.state.context.keys else "", models)
        lifecycle.ready([model.name for model in models], lambda: _stalled_s(models))
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        lifecycle.stopping()
        await models.stop(drain_timeout)
    server.exit()
    await asyncio.wait({serving}, timeout=FLUSH_S)
    server.cut()
    await serving
    stopping.cancel()
    await responses.close()
    if models.wedged:
        complain("The model does not come back from a step; it is left behind.")
        lifecycle.end_process(1)
    if models.abandoned:  # its load cannot be interrupted
        lifecycle.end_process(code)
    lifecycle.ended()
    return code


def _tell(announce: Announce, url: str, credentials: str, models: Models) -> None:
    for model in models:
        if not model.ready:
            continue
        if isinstance(model.engine, Engine):
            engine = model.engine
            chats = engine.tokenizer.has_chat_template
            stats, longest = engine.stats().runner, engine.longest_request
            announce(Serving(url, engine.info, stats, engine.config, chats, credentials, longest))
        elif isinstance(model.engine, EmbeddingEngine):
            announce(EmbeddingServing(url, model.engine.info, credentials))
    standby = tuple(model.name for model in models if model.state is State.UNLOADED)
    if standby:
        announce(Standby(url, standby))


def _stalled_s(models: Models) -> float:
    """How long the longest step in progress has taken."""
    return max((engine.stats().stalled_s for engine in models.engines), default=0.0)


def _url(listener: socket.socket, *, secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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


def _install_signals(lifecycle: Lifecycle, models: Models) -> asyncio.Event:
    """The event is set by the first SIGTERM or SIGINT; the second ends the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(name: str) -> None:
        if stop.is_set():
            logger.info("%s again: running answers are cut off", name)
            lifecycle.end_process(0)
        _stop_for(name, stop, models)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return stop


def _stop_for(name: str, stop: asyncio.Event, models: Models) -> None:
    """A signal of this name has come."""
    loading = ", ".join(model.name for model in models if model.state is State.LOADING)
    logger.info("%s: the server stops%s", name, f", while {loading} still loads" if loading else "")
    stop.set()


def _terminal() -> Callable[[], bool]:
    """Is there one whose end is a signal to stop? `nohup` starts a program with that signal ignored."""
    return (lambda: False) if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else has_terminal


def _uvicorn_config(app: object, limits: ConnectionLimits, tls: ssl.SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        timeout_keep_alive=limits.idle_s,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=list(limits.proxies),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,  # `observe.request_line` has one of its own
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=2 * FLUSH_S,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
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
