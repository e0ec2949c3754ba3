"""Several fake models behind one app, each loaded when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
from fastapi import FastAPI

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import BatchCost
from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.memory.budget import Budget, Reservation
from chairlift.engine.plan import LoadedModel
from chairlift.server.app import app_of
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.model import Found, Model, ModelSpec, Use
from chairlift.server.models.models import Models
from chairlift.server.serve import watch
from chairlift.server.settings import ServerSettings
from tests.engine.embedding.fakes import fake_embedder
from tests.fakes import FakeRunner, answering, fake_model
from tests.gate import Gate
from tests.server.harness import CHAT, JSON, chat_body


@dataclass
class Fake:
    """One model. It answers its own name.

    Attributes:
        faults: what its next loads raise, in order.
        gate: where its loads wait.
        runners: of its loads so far.
    """

    name: str
    size: int = 0
    use: Use = Use.GENERATION
    known: bool = True
    """Its use is told before its files are found."""
    at_start: bool = False
    pinned: bool = False
    idle_unload_s: float | None = None
    aliases: tuple[str, ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)
    make_runner: Callable[[], FakeRunner] | None = None
    batch_cost: BatchCost | None = None
    """Of one that embeds."""
    faults: list[Exception] = field(default_factory=list)
    gate: Gate = field(default_factory=Gate)
    runners: list[FakeRunner] = field(default_factory=list)
    finds: int = 0

    def spec(self, metrics: ServerMetrics) -> ModelSpec:
        return ModelSpec(
            self.name,
            lambda: self._find(metrics),
            aliases=self.aliases,
            use=self.use if self.known else None,
            context_length=4096,
            at_start=self.at_start,
            pinned=self.pinned,
            idle_unload_s=self.idle_unload_s,
            defaults=self.defaults,
            found=self._find(metrics) if self.at_start else None,  # as `specs_of`: so the first loads first
        )

    async def at_gate(self) -> None:
        """Wait until a load stands at the closed gate."""
        assert await asyncio.to_thread(self.gate.wait), f"no load of {self.name} came to the gate"

    def _find(self, metrics: ServerMetrics) -> Found:
        self.finds += 1
        if self.use is Use.EMBEDDING:
            model = fake_embedder(name=self.name, weight_bytes=self.size, batch_cost=self.batch_cost)

            def embed(budget: Budget | None, weights: Reservation | None) -> EmbeddingEngine:
                return EmbeddingEngine(model, budget=budget, weights=weights)

            return Found(self.use, self.size, embed)
        observer = metrics.model(self.name)

        def make(budget: Budget | None, weights: Reservation | None) -> Engine:
            return Engine(self._load, self.config, observer=observer, budget=budget, weights=weights)

        return Found(self.use, self.size, make)

    def _load(self) -> LoadedModel:
        self.gate.go()
        if self.faults:
            raise self.faults.pop(0)
        runner = self.make_runner() if self.make_runner is not None else FakeRunner(answering(self.name))
        self.runners.append(runner)
        loaded = fake_model(runner, name=self.name)()
        return replace(loaded, info=replace(loaded.info, weight_bytes=self.size))


@dataclass(frozen=True)
class Fleet:
    fakes: dict[str, Fake]
    models: Models
    client: httpx.AsyncClient
    app: FastAPI
    budget: Budget | None

    def model(self, name: str) -> Model:
        model = self.models.find(name)
        assert model is not None
        return model

    def states(self) -> dict[str, str]:
        return {model.name: model.state.value for model in self.models}

    async def chat(self, name: str, **more: object) -> httpx.Response:
        return await self.client.post(CHAT, json=chat_body(model=name, **more))

    async def says(self, name: str) -> str:
        response = await self.chat(name)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    async def operate(self, what: str, **body: object) -> httpx.Response:
        return await self.client.post(f"/v1/models/{what}", json=body)

    async def card(self, name: str) -> JSON:
        card: JSON = (await self.client.get(f"/v1/models/{name}")).json()
        return card

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not met():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def fleet(
    *fakes: Fake,
    total: int | None = None,
    load_timeout: float = 10.0,
    drain_timeout: float = 10.0,
    max_waiting: int = 256,
    start: bool = True,
) -> AsyncIterator[Fleet]:
    metrics = ServerMetrics()
    budget = Budget(total) if total is not None else None
    models = Models(
        [fake.spec(metrics) for fake in fakes],
        budget=budget,
        load_timeout=load_timeout,
        drain_timeout=drain_timeout,
        max_waiting=max_waiting,
        watch=lambda model: watch(metrics, model),
    )
    app = app_of(models, ServerSettings(), metrics)
    if start:
        await models.start()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Fleet({fake.name: fake for fake in fakes}, models, client, app, budget)
    finally:
        for fake in fakes:
            fake.gate.open()
            for runner in fake.runners:
                runner.open_gate()
        await asyncio.wait_for(models.settle(), 10)
        await models.stop(0.0)
        await app.state.context.responses.close()
        for fake in fakes:
            assert all(runner.violations == [] for runner in fake.runners)
