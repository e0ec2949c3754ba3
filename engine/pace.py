"""How many prompt tokens a step may take while answers run, so that nobody's next token is late. Pure.

A step costs about what its decode rows cost alone, plus so much a prompt token: both are measured as the
server runs, and the chunk is what fits into the time allowed. Steps in which nobody decodes keep nobody
waiting, and take the whole token budget.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from chairlift.engine.plan import StepPlan

SHARE = 5.0
"""A step that also prefills may take so many times as long as one that only decodes, unless a time is set."""
LEAST_TIME = 0.05
"""Seconds it may take at least, unless a time is set."""
SAMPLES = 9
"""Steps whose median counts: one that compiles a kernel, or meets a busy machine, says little."""
LEAST_TOKENS = 16
"""A step with fewer prompt tokens tells nothing of what one costs."""


class Pace:
    """
    Args:
        seconds: that a step may take while rows decode; None: `SHARE` times a decode step.
        start: prompt tokens of a step before anything is known.
        most: tokens of any step.
        grain: budgets are multiples of this where they are larger: devices plan anew for every new length.
    """

    def __init__(self, seconds: float | None, *, start: int, most: int, grain: int = 1) -> None:
        self._seconds = seconds
        self._start = min(start, most)
        self._most = most
        self._grain = grain
        self._before: StepPlan | None = None
        self._decode: deque[float] = deque(maxlen=SAMPLES)
        self._token: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Launching this plan and waiting for the one before took so long. Which of the two it went to
        depends on the device, so only what holds for both tells anything."""
        before, self._before = self._before, plan
        if before is None or before.encode or plan.encode:
            return
        tokens = [sum(len(span.tokens) for span in each.prefill) for each in (before, plan)]
        if not any(tokens) and before.decode and plan.decode:
            self._decode.append(seconds)
        elif min(tokens) >= LEAST_TOKENS and self._decode:
            self._token.append(2 * max(0.0, seconds - median(self._decode)) / sum(tokens))

    @property
    def allowed(self) -> float | None:
        """Seconds; None as long as that is not known."""
        if self._seconds is not None:
            return self._seconds
        return max(LEAST_TIME, SHARE * median(self._decode)) if self._decode else None

    def tokens(self) -> int:
        """Prompt tokens for a step in which rows decode; at least 1."""
        allowed = self.allowed
        if allowed is None or not self._decode or not self._token:
            return self._start
        each = median(self._token)
        room = max(0.0, allowed - median(self._decode))
        tokens = self._most if each * self._most <= room else int(room / each)
        if tokens > self._grain:
            tokens -= tokens % self._grain
        return max(1, min(tokens, self._most))
