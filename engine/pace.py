"""How many prompt tokens a step may take while answers run, so that nobody's next token is late. Pure.

A step costs about what its decode rows cost alone, plus something for having prompts in it at all, plus so
much a prompt token: all three are measured as the server runs, and the chunk is what fits into the time
allowed. Steps in which nobody decodes keep nobody waiting, and take the whole token budget.

Where having prompts at all takes most of the time allowed (dispatch of many small operations, weights read
once more), smaller chunks only pay it more often: a chunk's tokens may always take as long as that.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median

from chairlift.engine.plan import StepPlan
from chairlift.engine.sharing import Sharing

SHARE = 5.0
"""A step that also prefills may take so many times as long as one that only decodes, unless a time is set."""
LEAST_TIME = 0.05
"""Seconds it may take at least, unless a time is set."""
SAMPLES = 9
"""Steps whose median counts: one that compiles a kernel, or meets a busy machine, says little."""
APART = 1 / 8
"""Two steps tell what a prompt token costs if their numbers of tokens differ by at least this share."""


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
        self._prompts: deque[tuple[float, float]] = deque(maxlen=2 * SAMPLES)
        """Tokens, and seconds beyond a decode step's."""
        self._alone: deque[float] = deque(maxlen=SAMPLES)
        """Tokens a second of steps of prompts alone."""
        self._known: tuple[float, float, bool] | None = None
        """What `_costs` makes of them."""

    @classmethod
    def of(cls, milliseconds: float | None, budget: int) -> Pace:
        """For steps of so many tokens at most, which may take so long."""
        seconds = None if milliseconds is None else milliseconds / 1000
        return cls(seconds, start=max(1, budget // 2), most=budget, grain=Sharing.of(budget).grain)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Launching this plan and waiting for the one before took so long. Which of the two it went to
        depends on the device, so only what holds for both tells anything."""
        before, self._before = self._before, plan
        if before is None or before.encode or plan.encode:
            return
        tokens = [sum(len(span.tokens) for span in each.prefill) for each in (before, plan)]
        if min(tokens) and seconds > 0 and not before.decode and not plan.decode:
            self._alone.append(sum(tokens) / 2 / seconds)
        if not any(tokens) and before.decode and plan.decode:
            self._decode.append(seconds)
        elif min(tokens) and self._decode:
            self._prompts.append((sum(tokens) / 2, max(0.0, seconds - median(self._decode))))
            self._known = None

    def rate(self) -> float | None:
        """Tokens a second that prompts are computed at where nobody decodes; None before that was seen."""
        return median(self._alone) if self._alone else None

    @property
    def allowed(self) -> float | None:
        """Seconds; None as long as that is not known."""
        if self._seconds is not None:
            return self._seconds
        return max(LEAST_TIME, SHARE * median(self._decode)) if self._decode else None

    def tokens(self) -> int:
        """Prompt tokens for a step in which rows decode; at least 1."""
        allowed = self.allowed
        if allowed is None or not self._decode or len(self._prompts) < 3:
            return self._start
        if self._known is None:
            self._known = self._costs()
        fixed, each, sure = self._known
        room = max(0.0, allowed - median(self._decode) - fixed, fixed)
        tokens = self._most if each * self._most <= room else int(room / each)
        if not sure and len(self._prompts) > SAMPLES:
            tokens = tokens // 2 or 2  # another number now and then, or nothing new is ever learnt
        if tokens > self._grain:
            tokens -= tokens % self._grain
        return max(1, min(tokens, self._most))

    def _costs(self) -> tuple[float, float, bool]:
        """Seconds of having prompts in a step, and of a prompt token: the line through the samples by the
        median of slopes (Theil and Sen); and whether they tell. All goes to the tokens where they do not."""
        highest = median(seconds / tokens for tokens, seconds in self._prompts)
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0])
            for a, b in combinations(self._prompts, 2)
            if abs(b[0] - a[0]) >= APART * a[0]
        ]
        each = min(max(median(slopes), 0.0), highest) if slopes else highest
        fixed = median(seconds - each * tokens for tokens, seconds in self._prompts)
        return max(0.0, fixed), each, bool(slopes)
