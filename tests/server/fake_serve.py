"""A server over the fake model, to be sent signals: `python -m tests.server.fake_serve PORT DRAIN ANSWER`.

ANSWER: "endless", "short", "wedge" (the runner never comes back from a step of a request), "unloadable",
"slow" (loading never ends), "embeddings" (nothing else is served), "both" (an embedding model beside
"short"), "unembeddable" (the embedding model beside it cannot be loaded).
"""

from __future__ import annotations

import asyncio
import sys
import threading

from chairlift.engine.config import EngineConfig
from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import LoadedEmbedder
from chairlift.engine.engine import Engine
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.plan import LoadedModel, StepPlan, StepResult
from chairlift.server.metrics import ServerMetrics
from chairlift.server.serve import EmbeddingServing, Serving, listen, serve_engine
from chairlift.server.settings import ServerSettings
from tests.engine.embedding.fakes import fake_embedder
from tests.fakes import FakeRunner, answering, fake_model


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


def announce(serving: Serving | EmbeddingServing) -> None:
    print(serving.url, flush=True)
    print(serving.curl, flush=True)


def complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    port, drain, answer = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    metrics = ServerMetrics("fake")
    engine = embedder = None
    if answer != "embeddings":
        engine = Engine(lambda: load(answer), EngineConfig(close_timeout=0.3), observer=metrics)
    if answer in ("embeddings", "both", "unembeddable"):
        embedder = EmbeddingEngine(lambda: embed(answer))
    with listen("127.0.0.1", port) as listener:
        if answer == "slow":
            print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        return asyncio.run(
            serve_engine(
                engine,
                listener,
                announce,
                complain,
                metrics=metrics,
                settings=ServerSettings(),
                drain_timeout=drain,
                embedder=embedder,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
