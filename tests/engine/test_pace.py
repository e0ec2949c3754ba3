"""Chunks that fit the time a step may take, whatever the device and its moods."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from chairlift.engine.pace import LEAST_TIME, SHARE, Pace
from chairlift.engine.plan import Span, StepPlan

DECODE = StepPlan(1, decode=(1,))


def mixed(tokens: int) -> StepPlan:
    return StepPlan(2, prefill=(Span(2, 0, (0,) * tokens, last=False),), decode=(1,))


def follow(pace: Pace, first: StepPlan, second: StepPlan, seconds: float) -> None:
    """Two steps that follow one another, and nothing else."""
    for plan in (StepPlan(0), first):
        pace.observe(plan, 0.0)
    pace.observe(second, seconds)


def settled(pace: Pace, decode: float, token: float, steps: int = 20, fixed: float = 0.0) -> Pace:
    """After a while on a device of these costs."""
    for _ in range(steps):
        follow(pace, DECODE, DECODE, decode)
        tokens = pace.tokens()
        follow(pace, mixed(tokens), mixed(tokens), decode + fixed + token * tokens)
        follow(pace, mixed(tokens), DECODE, decode)
        follow(pace, DECODE, mixed(tokens), decode)
    return pace


def test_the_rate_is_that_of_steps_of_prompts_alone() -> None:
    pace = Pace(None, start=64, most=256)
    alone = StepPlan(3, prefill=(Span(2, 0, (0,) * 100, last=False),))
    follow(pace, DECODE, DECODE, 0.1)
    follow(pace, mixed(100), mixed(100), 0.5)
    follow(pace, DECODE, alone, 0.1)
    assert pace.rate() is None
    follow(pace, alone, alone, 0.2)
    assert pace.rate() == 500


def test_before_anything_is_known_it_starts_as_told() -> None:
    pace = Pace(None, start=64, most=256)
    assert pace.tokens() == 64 and pace.allowed is None
    follow(pace, DECODE, DECODE, 0.1)
    assert pace.tokens() == 64 and pace.allowed == pytest.approx(0.5)
    assert Pace(None, start=64, most=16).tokens() == 16


def test_a_chunk_fills_the_time_that_is_left() -> None:
    # 0.1 s of decode, 6 ms a token: (0.5 - 0.1) / 0.006 = 66 tokens.
    assert settled(Pace(None, start=32, most=512), 0.1, 0.006).tokens() == 66
    assert settled(Pace(0.26, start=32, most=512), 0.1, 0.006).tokens() == 26
    assert settled(Pace(0.25, start=64, most=512, grain=16), 0.1, 0.006).tokens() == 16


def test_a_fast_device_is_bound_by_the_budget_and_a_late_one_by_nothing_less_than_a_token() -> None:
    assert settled(Pace(None, start=64, most=512), 0.002, 1e-6).tokens() == 512
    assert settled(Pace(0.05, start=64, most=512), 0.1, 0.006).tokens() == 1


@given(
    decode=st.floats(1e-4, 1),
    token=st.floats(1e-6, 0.1),
    most=st.integers(16, 4096),
    grain=st.integers(1, 64),
)
def test_steps_keep_to_the_time_allowed(decode: float, token: float, most: int, grain: int) -> None:
    pace = settled(Pace(None, start=most // 2, most=most, grain=grain), decode, token)
    tokens = pace.tokens()
    assert 1 <= tokens <= most
    allowed = max(LEAST_TIME, SHARE * decode)
    if tokens >= 16:
        assert decode + tokens * token <= allowed * 1.001
        assert tokens <= grain or tokens == most or tokens % grain == 0


@given(
    decode=st.floats(1e-3, 0.1),
    fixed=st.floats(0, 1),
    token=st.floats(1e-5, 1e-2),
    start=st.integers(16, 4096),
)
def test_chunks_do_not_shrink_below_what_a_step_with_prompts_costs_at_all(
    decode: float, fixed: float, token: float, start: int
) -> None:
    pace = settled(Pace(None, start=start, most=4096), decode, token, steps=60, fixed=fixed)
    follow(pace, mixed(40), mixed(40), decode + fixed + token * 40)  # lengths vary in the end
    tokens, allowed = settled(pace, decode, token, fixed=fixed).tokens(), max(LEAST_TIME, SHARE * decode)
    room = max(allowed - decode - fixed, fixed)
    assert tokens == 4096 or tokens <= 16 or tokens * token == pytest.approx(room, rel=0.1, abs=token)


def test_a_device_that_compiled_at_first_recovers() -> None:
    pace = Pace(0.05, start=1024, most=1024, grain=32)
    for _ in range(5):
        follow(pace, DECODE, DECODE, 0.012)
        follow(pace, mixed(1024), mixed(1024), 2.0)
    assert pace.tokens() <= 32
    assert settled(pace, 0.012, 1e-5, fixed=0.045, steps=60).tokens() == 1024


def test_one_slow_step_changes_nothing() -> None:
    pace = settled(Pace(None, start=64, most=512), 0.1, 0.006)
    follow(pace, DECODE, DECODE, 15)
    follow(pace, mixed(64), mixed(64), 15)
    assert pace.tokens() == 66


def test_images_tell_nothing() -> None:
    pace = Pace(None, start=64, most=512)
    follow(pace, DECODE, DECODE, 0.1)
    follow(pace, mixed(64), DECODE, 3)
    follow(pace, DECODE, StepPlan(3, decode=(1,), encode=(2,)), 9)
    follow(pace, DECODE, StepPlan(3), 9)
    assert pace.tokens() == 64 and pace.allowed == pytest.approx(0.5)
