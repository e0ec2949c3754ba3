"""Carries out what the roster decides: models are found, loaded, handed to requests, and unloaded.

Everything here runs on the event loop. Each engine has an MLX thread of its own, so that a model that loads
takes its share of the device from those that answer, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineError, EngineStopped, ModelUnavailable, QueueFull
from chairlift.engine.memory.budget import Budget
from chairlift.server.errors import APIError
from chairlift.server.models.catalogue import Catalogue
from chairlift.server.models.faults import as_fault, does_not_fit, without_paths
from chairlift.server.models.holdings import Holdings
from chairlift.server.models.leases import Lease
from chairlift.server.models.model import AdoptedModel, Found, Model, ModelSpec
from chairlift.server.models.refusals import busy, failed, in_use, pinned, still_loading
from chairlift.server.models.roster import Find, Load, Roster, State
from chairlift.server.models.tasks import log_defect, on_a_thread

logger = logging.getLogger("chairlift.server")
lifecycle = logging.getLogger("chairlift.lifecycle")

LOOK_AGAIN_S = 0.25
"""Between two looks at whether rows of no open request have ended, while somebody waits for that."""
UNLOADED = "The model was unloaded by an operator; the next request loads it again."


class Models(Catalogue):
    """All models of a process.

    Args:
        budget: what loaded models reserve their bytes of; None: there is no bound.
        load_timeout: seconds that a request waits for a model to be loaded.
        drain_timeout: seconds that an operator's unload waits for running answers.
        max_waiting: requests that may wait for one model.
        watch: told of every model whose engine has come, or gone.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        budget: Budget | None = None,
        load_timeout: float = 300.0,
        drain_timeout: float = 30.0,
        max_waiting: int = 256,
        watch: Callable[[Model], None] = lambda model: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = Roster()
        super().__init__(Model(spec, self._roster.add(spec.entry())) for spec in specs)
        self._holdings = Holdings(budget)
        self._load_timeout = load_timeout
        self._drain_timeout = drain_timeout
        self._max_waiting = max_waiting
        self._watch = watch
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @classmethod
    def of(cls, *engines: Engine | EmbeddingEngine | None) -> Models:
        """Engines whose lives are the caller's business."""
        models = cls(())
        for number, engine in enumerate(engines):
            if engine is not None:
                spec = ModelSpec(f"model {number}", _unfindable)
                models.adopt(spec, engine)
        return models

    def adopt(self, spec: ModelSpec, engine: Engine | EmbeddingEngine) -> None:
        """An engine whose life is the caller's business, under the name that it gives itself."""
        self._models.append(AdoptedModel(spec, self._roster.add(spec.entry()), engine))

    # -- for requests

    async def acquire(self, model: Model) -> Lease:
        """Once it is loaded.

        Raises:
            EngineStopped: the server stops, or the models of the start are not there yet.
            QueueFull: too many wait for it.
            APIError: 503: it cannot be loaded, or not in time.
        """
        if self.takes(model):
            self._check_ready(model)
            self._roster.use(model.entry.name, self._clock())
        else:
            await self._wait_for(model)
        return Lease(lambda: self._release(model))

    def takes(self, model: Model) -> bool:
        """New requests for it, now."""
        loaded = model.entry.state is State.LOADED
        return loaded and not self._roster.yields(model.entry.name, self._clock())

    def _check_ready(self, model: Model) -> None:
        self.require_open()
        if not model.ready:
            raise EngineStopped("The model is not ready yet; try again soon.")

    async def _wait_for(self, model: Model) -> None:
        entry = model.entry
        if not self.ready:
            raise EngineStopped("The model is not ready yet; try again soon.")
        if (waiting := entry.waiters + entry.deferred) >= self._max_waiting:
            raise QueueFull(f"{waiting} requests wait for {model.name} to be loaded.", 5.0)
        try:
            async with asyncio.timeout(self._load_timeout):
                await self._until_its_turn(model)
                await self._until_loaded(model)
        except TimeoutError:
            raise still_loading(model.name) from None

    async def _until_its_turn(self, model: Model) -> None:
        entry = model.entry
        entry.deferred += 1
        try:
            while entry.state is State.LOADED and not self.takes(model):
                await self._change()
        finally:
            entry.deferred -= 1

    async def _until_loaded(self, model: Model) -> None:
        """And used."""
        entry = model.entry
        if not self._roster.want(entry.name, self._clock()):
            raise self._failure(model)
        entry.waiters += 1
        try:
            self._act()
            while entry.state is not State.LOADED:
                if entry.state is State.FAILED:
                    raise self._failure(model)
                await self._change()
            self._check_ready(model)
            self._roster.use(entry.name, self._clock())
        finally:
            entry.waiters -= 1
            self._act()

    def _release(self, model: Model) -> None:
        self._roster.leave(model.entry.name, self._clock())
        self._act()

    def _failure(self, model: Model) -> APIError:
        return failed(model.name, model.entry.reason, model.entry.retry_at - self._clock())

    async def _change(self) -> None:
        """Wait until something has changed. Raises: EngineStopped."""
        self.require_open()
        await self._news.wait()
        self.require_open()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- for operators

    async def load(self, model: Model) -> None:
        """Load it, also if it has failed just now; returns when it is loaded.

        Raises: as `acquire`.
        """
        self._roster.forgive(model.entry.name)
        lease = await self.acquire(model)
        lease.release()

    async def unload(self, model: Model, *, force: bool = False) -> None:
        """Unload it, when its running answers are through or, by force, at once.

        Raises: APIError: 409: it is pinned, is being loaded, or its answers take too long.
        """
        entry, engine = model.entry, model.engine
        if entry.pinned or isinstance(model, AdoptedModel):
            raise pinned(model.name)
        if entry.state in (State.UNLOADED, State.FAILED):
            return
        if entry.state is not State.LOADED:
            raise busy(model.name, model.state)
        if force:
            self._begin(self._unload(model, self._roster.expel(entry.name).why))
        entry.leaving = True
        self._act()
        try:
            async with asyncio.timeout(self._drain_timeout):
                while entry.leaving and entry.state in (State.LOADED, State.UNLOADING):
                    await self._change()
        except TimeoutError:
            entry.leaving = False
            self._act()
        if model.engine is engine and entry.state is State.LOADED:  # the time of this call or another is up
            raise in_use(model.name)

    # -- life

    async def start(self) -> None:
        """Load those that are to be loaded at the start. Those that cannot be have failed.

        Raises: EngineError: there is none that could be loaded; what the first one failed with.
        """
        wanted = [model for model in self._models if model.spec.at_start]
        now = self._clock()
        for model in wanted:
            self._roster.want(model.entry.name, now)
            model.entry.wanted = True
        self._act()
        while any(model.entry.wanted for model in wanted):
            await self._change()
        self.started = True
        if wanted and all(model.entry.state is State.FAILED for model in wanted) and len(wanted) == len(self):
            raise self._fault(wanted[0])

    async def stop(self, drain_timeout: float) -> None:
        """Admit nothing more, let running answers finish for so many seconds, end the rest. A load that is
        under way is left alone: `abandoned`."""
        self._stopping = True
        self._tell()
        if self._timer is not None:
            self._timer.cancel()
        engines = [
            model.engine
            for model in self._models
            if model.engine is not None and model.entry.state in (State.LOADED, State.UNLOADING)
        ]
        await asyncio.gather(*(engine.stop(drain_timeout) for engine in engines))

    async def settle(self) -> None:
        """Wait until nothing is looked for, loaded or unloaded any more."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- what the roster decides

    def _act(self) -> None:
        self._tell()  # those who wait look again when what is decided here has begun
        if self.draining or self._roster.settled:
            return
        busy = {model.entry.name for model in self._models if model.busy}
        now = self._clock()
        for action in self._roster.decide(now, self._holdings.available, busy):
            model = next(model for model in self._models if model.entry.name == action.name)
            if isinstance(action, Find):
                self._begin(self._find(model))
            elif isinstance(action, Load):
                # In the same turn as the decision.
                self._holdings.reserve(model.entry.name, model.entry.size or 0, model.name)
                self._begin(self._load(model))
            else:
                self._begin(self._unload(model, action.why))
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._roster.deadline(now)
        delays = [] if deadline is None else [max(LOOK_AGAIN_S, deadline - now)]
        if any(e.state is State.WAITING or e.leaving for e in self._roster.entries.values()):
            delays.append(LOOK_AGAIN_S)
        if delays:
            self._timer = asyncio.get_running_loop().call_later(min(delays), self._act)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # What a request is known by in the log is not the work's, which others wait for, too.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_defect)

    async def _find(self, model: Model) -> None:
        try:
            found = model.found
            if found is None:
                found = await on_a_thread(model.spec.find)
        except Exception as error:
            self._fail(model, error)
        else:
            model.found = found
            self._roster.found(model.entry.name, max(found.size, model.held))
        self._act()

    async def _load(self, model: Model) -> None:
        name, found = model.entry.name, model.found
        assert found is not None
        began = self._clock()
        why = "at the start" if model.entry.wanted else "asked for"
        try:
            engine = found.make(self._holdings.budget, self._holdings.of(name))
            model.begin(engine)
            self._watch(model)
            await engine.start()
        except Exception as error:
            model.end()
            self._watch(model)
            self._holdings.release(name)
            self._fail(model, error)
        else:
            self._holdings.claim(name, engine.info.weight_bytes)
            model.held = self._holdings.owned(model.name)
            model.loads, model.load_seconds = model.loads + 1, model.load_seconds + self._clock() - began
            self._roster.loaded(name, model.held, self._clock())
            lifecycle.info("%s is loaded: %s (%.1f s)", model.name, why, self._clock() - began)
        self._act()

    async def _unload(self, model: Model, why: str) -> None:
        name, engine = model.entry.name, model.engine
        assert engine is not None
        await engine.stop(why=UNLOADED)
        if engine.wedged:
            self._roster.failed(name, "its thread does not come back", self._clock(), for_good=True)
        else:
            model.end()
            self._watch(model)
            self._holdings.release(name)
            self._roster.unloaded(name, self._clock())
            lifecycle.info("%s is unloaded: %s", model.name, why)
        self._act()

    def _fail(self, model: Model, error: Exception) -> None:
        model.fault = fault = as_fault(error, model.name)
        model.failures += 1
        self._roster.failed(model.entry.name, without_paths(fault.message), self._clock())
        if self.started:
            logger.warning("%s could not be loaded: %s", model.name, fault.message)
        self._tell()

    @property
    def faults(self) -> list[tuple[Model, EngineError]]:
        """The models that have failed, and why, in full."""
        return [(each, self._fault(each)) for each in self._models if each.entry.state is State.FAILED]

    def _fault(self, model: Model) -> EngineError:
        fault = model.fault
        if fault is not None and model.entry.reason == without_paths(fault.message):
            return fault
        return does_not_fit(model.name, model.entry.reason)


def _unfindable() -> Found:
    raise ModelUnavailable("It is not ours to load.")
