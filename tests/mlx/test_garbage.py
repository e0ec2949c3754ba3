"""Memory goes back with the last reference, not when Python's collector of cycles comes by: a long row holds
gigabytes."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.models.build import make_runner
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, build
from tests.mlx.lift import Lift, Ride
from tests.mlx.solo import prompt

RIDES = [
    Ride(prompt(40), tokens=4, chunks=(16,)),
    Ride(prompt(7, 1), join=1, tokens=6),
    Ride(prompt(90, 2), join=1, tokens=5, chunks=(16,), cancel=3),
    Ride(prompt(3, 3), join=2, tokens=9, cancel=6),
    Ride(prompt(20, 4), join=3, tokens=4, preempt=(5,)),
]


@pytest.mark.parametrize(
    ("name", "batching"),
    [
        ("llama", Batching.FLAT),
        ("gemma3_text", Batching.FLAT),
        ("mamba2", Batching.HYBRID),
        ("falcon_h1", Batching.HYBRID),
        ("deepseek_v3", Batching.DENSE),
        ("llama", Batching.SOLO),
    ],
)
def test_rides_leave_no_array_behind(name: str, batching: Batching) -> None:
    lift = Lift(make_runner(build(FAMILIES[name]), VOCABULARY, batching)[1])
    lift.run(RIDES)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    gc.disable()
    try:
        lift.run(RIDES)
        mx.synchronize()
        assert mx.get_active_memory() == before
    finally:
        gc.enable()
    assert lift.failures == {}
