"""A server over the fake model, a process of its own: `python -m tests.faults.fake_server JSON`.

The JSON object has what `Options` has; each left out has its default.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.engine.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.plan import StepPlan, StepResult
from chairlift.server.configuration.read import read
from chairlift.server.configuration.serving import server_settings
from chairlift.server.metrics import ServerMetrics
from chairlift.server.serve import listen, serve_models
from tests.fakes import FakeRunner, answering, fake_model, letters
from tests.served.process import Served, started
from tests.server.given_engines import models_of
from tests.server.test_serve import ROOT

MODEL = "fake"
REMEMBERED = 200
"""Plans and released rows that the runner keeps: a server that runs for long must not grow by its fake."""
BAD = "fail this step"
HANGING = "hang in this step"
"""Prompts with which a step raises, or never comes back."""


@dataclass(frozen=True)
class Options:
    """
    Args:
        settings: of the configuration, as a file would have them.
        model, context: its name, and how many tokens it takes.
        seqs, waiting: rows at once, and requests that may wait for one.
        step_ms: what a step takes on the device.
        answer: what every request is answered; None: letters that depend on the prompt, up to the bound.
        port, drain_s, watchdog_s: as `chairlift serve` has them.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = MODEL
    context: int = 10**6
    seqs: int = 32
    waiting: int = 4096
    step_ms: float = 1.0
    answer: str | None = None
    port: int = 0
    drain_s: float = 30.0
    watchdog_s: float = 0.0


class Runner(FakeRunner):
    """Takes its time, and goes wrong for prompts that say so."""

    def __init__(self, options: Options) -> None:
        super().__init__(letters if options.answer is None else answering(options.answer))
        self._seconds = options.step_ms / 1000

    def step(self, plan: StepPlan) -> StepResult | None:
        for span in plan.prefill:
            prompt = bytes(token for token in span.tokens if token < 256)
            if HANGING.encode() in prompt:
                threading.Event().wait()
            if BAD.encode() in prompt:
                raise RuntimeError("The device is gone.")
        if not plan.idle:
            time.sleep(self._seconds)
        del self.plans[:-REMEMBERED], self.released[:-REMEMBERED]
        result = super().step(plan)
        assert not self.violations, self.violations
        return result


def fake_serving(options: Options, *before: str) -> AbstractContextManager[Served]:
    """Such a server, ready; killed at the end where it still runs.

    Args:
        before: a command that runs the one that follows it.
    """
    command = [*before, sys.executable, "-m", "tests.faults.fake_server", json.dumps(options.__dict__)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return started(command, "http", cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


def main() -> int:
    options = Options(**json.loads(sys.argv[1]))
    metrics = ServerMetrics()
    observer = metrics.model(options.model)
    engine = Engine(
        fake_model(Runner(options), name=options.model, context_length=options.context),
        EngineConfig(max_num_seqs=options.seqs, max_waiting=options.waiting, close_timeout=0.3),
        observer=observer,
    )
    observer.watch(engine)
    given = {"access_log": False, **options.settings}
    with listen("127.0.0.1", options.port) as listener:
        return asyncio.run(
            serve_models(
                models_of(metrics, engine),
                listener,
                lambda serving: print(serving.url, flush=True),
                lambda line: print(line, file=sys.stderr, flush=True),
                metrics=metrics,
                settings=server_settings(read(given, Path("/dev/null")).configuration),
                drain_timeout=options.drain_s,
                watchdog_s=options.watchdog_s,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
