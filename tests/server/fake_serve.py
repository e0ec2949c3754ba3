"""A server over the fake model, to be sent signals: `python -m tests.server.fake_serve PORT DRAIN ANSWER`.

ANSWER: "endless", "short", "wedge" (the runner never comes back from a step of a request), "unloadable",
"slow" (loading never ends), "embeddings" (nothing else is served), "both" (an embedding model beside
"short"), "unembeddable" (the embedding model beside it cannot be loaded), "deaf" (once ready, the event loop
hangs), "latecomer" (beside "short", a model on demand whose load never ends).
A fourth argument is the watchdog's seconds. With LOGGED in the environment it logs as a server does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

from chairlift.engine.config import EngineConfig
from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import LoadedEmbedder
from chairlift.engine.engine import Engine
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.plan import LoadedModel, StepPlan, StepResult
from chairlift.server.configuration.read import read
from chairlift.server.configuration.serving import server_settings
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.model import Found, ModelSpec, Use
from chairlift.server.models.models import Models
from chairlift.server.observe.logs import set_up_logging
from chairlift.server.serve import listen, serve_models
from chairlift.server.served import EmbeddingServing, Serving, Standby
from tests.engine.embedding.fakes import fake_embedder
from tests.fakes import FakeRunner, answering, fake_model
from tests.server.given_engines import models_of


class Wedging(FakeRunner):
    def step(self, plan: StepPlan) -> StepResult | None:
        if self.released and not plan.idle:
            threading.Event().wait()
        return super().step(plan)


def runner(answer: str) -> FakeRunner:
    if answer == "wedge":
        return Wedging()
    return FakeRunner() if answer == "endless" else FakeRunner(answering("short"))


def load(answer: str) -> LoadedModel:
    if answer == "unloadable":
        raise ModelUnavailable("These weights are no weights.")
    if answer == "slow":
        print("loading", flush=True)
        threading.Event().wait()
    return fake_model(runner(answer), context_length=10**9)()


def embed(answer: str) -> LoadedEmbedder:
    if answer == "unembeddable":
        raise ModelUnavailable("These weights embed nothing.")
    return fake_embedder()()


def announce(serving: Serving | EmbeddingServing | Standby) -> None:
    if isinstance(serving, Standby):
        return
    print(serving.url, flush=True)
    print(serving.curl, flush=True)
    if sys.argv[3] == "deaf":
        asyncio.get_running_loop().call_later(0.01, threading.Event().wait)


def complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def latecomer() -> Models:
    """ "short" at the start, and on demand "late", whose load never ends."""

    def spec(name: str, answer: str, at_start: bool) -> ModelSpec:
        found = Found(Use.GENERATION, 0, lambda *memory: Engine(lambda: load(answer)))
        return ModelSpec(name, lambda: found, at_start=at_start)

    return Models([spec("fake", "short", True), spec("late", "slow", False)])


def main() -> int:
    if "LOGGED" in os.environ:
        set_up_logging("warning")
    port, drain, answer = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    metrics = ServerMetrics()
    engine = embedder = None
    if answer != "embeddings":
        observer = metrics.model("fake")
        engine = Engine(lambda: load(answer), EngineConfig(close_timeout=0.3), observer=observer)
        observer.watch(engine)
    if answer in ("embeddings", "both", "unembeddable"):
        embedder = EmbeddingEngine(lambda: embed(answer))
    shared: dict[str, Any] = {
        "metrics": metrics,
        "settings": server_settings(read({"access_log": False}, Path("/dev/null")).configuration),
        "drain_timeout": drain,
        "watchdog_s": float(sys.argv[4]) if len(sys.argv) > 4 else 0.0,
    }
    with listen("127.0.0.1", port) as listener:
        if answer == "slow":
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        models = latecomer() if answer == "latecomer" else models_of(metrics, engine, embedder)
        return asyncio.run(serve_models(models, listener, announce, complain, **shared))


if __name__ == "__main__":
    sys.exit(main())
