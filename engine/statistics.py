"""What the engine counts of its steps, and when it reads what its runner holds."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from chairlift.engine.answers import Answers
from chairlift.engine.config import EngineStats
from chairlift.engine.memory.guard import MemoryGuard
from chairlift.engine.plan import Runner, RunnerStats
from chairlift.engine.prefix.disk import PrefixDisk
from chairlift.engine.prefix.vocabulary import DiskStats, PrefixStats
from chairlift.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

STATS_EVERY = 0.25
"""Seconds between two readings of the runner's memory while it steps; each reading walks all rows."""


@dataclass(slots=True)
class StepStatistics:
    """Counted on the event loop; `read` is called on the MLX thread."""

    steps: int = 0
    """Calls of the runner that came back."""
    runner: RunnerStats = field(default_factory=RunnerStats)
    """As last read."""
    _started: float | None = None
    _ended: float | None = None
    _read: float = 0.0

    def begin(self) -> float:
        """A step is handed to the thread; returns when, in monotonic seconds."""
        self._started = now = time.monotonic()
        return now

    def end(self) -> None:
        """It came back, or raised."""
        self.steps += 1
        self._ended = time.monotonic()
        self._started = None

    def read(self, runner: Runner, *, idle: bool) -> None:
        """What the runner holds, if it is time or the step was idle."""
        if idle or time.monotonic() - self._read > STATS_EVERY:
            self._read = time.monotonic()
            try:
                self.runner = runner.stats()
            except Exception:
                log.exception("The runner's memory could not be read")

    @property
    def stepping(self) -> bool:
        return self._started is not None

    @property
    def last_step_age_s(self) -> float | None:
        """Since the last step came back; None before the first."""
        ended = self._ended
        return None if ended is None else time.monotonic() - ended

    @property
    def stalled_s(self) -> float:
        """Since the step now on the thread was handed over; 0 between steps."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started


def stats_of(
    counted: StepStatistics,
    answers: Answers,
    memory: MemoryGuard,
    scheduler: Scheduler | None,
    disk: PrefixDisk | None,
) -> EngineStats:
    """Where an engine stands; without a scheduler it has not loaded its model."""
    return EngineStats(
        running=scheduler.running if scheduler else 0,
        waiting=scheduler.waiting if scheduler else 0,
        deferred=scheduler.deferred if scheduler else 0,
        steps=counted.steps,
        last_step_age_s=counted.last_step_age_s,
        stalled_s=counted.stalled_s,
        busy=counted.stepping or (scheduler.busy if scheduler else False),
        runner=counted.runner,
        prompt_tokens=answers.prompt_tokens,
        generation_tokens=answers.generation_tokens,
        finished=dict(answers.finished),
        preemptions=scheduler.preemptions if scheduler else 0,
        lost=scheduler.losses if scheduler else 0,
        wasted_tokens=scheduler.wasted if scheduler else 0,
        prefix=scheduler.prefixes.stats if scheduler else PrefixStats(),
        memory=memory.stats(),
        disk=disk.stats if disk is not None else DiskStats(),
    )
