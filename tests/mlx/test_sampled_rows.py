"""Seeded rows draw the same tokens alone, in any batch and after preemption, over a real runner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift.engine.models.build import make_runner
from chairlift.engine.plan import Sample
from chairlift.engine.request import SamplingParams
from tests.mlx.configs import VOCABULARY
from tests.mlx.lift import Lift, Ride
from tests.mlx.parity import finding, solo
from tests.mlx.solo import prompt

RIDES = (
    Ride(prompt(12), tokens=16, sampling=SamplingParams(temperature=1.0), seed=1),
    Ride(prompt(12), tokens=16, sampling=SamplingParams(temperature=1.0), seed=2),
    Ride(prompt(40), join=1, tokens=14, chunks=(9,), sampling=SamplingParams(temperature=0.7, top_p=0.9)),
    Ride(prompt(3), join=2, tokens=16, sampling=SamplingParams(temperature=1.5, top_k=5), seed=2**64 - 1),
    Ride(prompt(70), join=2, tokens=12, sampling=SamplingParams(temperature=1.2, min_p=0.1), seed=7),
    Ride(prompt(12), join=4, tokens=12, sampling=SamplingParams(temperature=0.0), seed=3),
)
STOPPED = tuple(replace(ride, preempt=(6 + index, 11)) for index, ride in enumerate(RIDES))


def tokens(samples: list[Sample]) -> list[int]:
    return [sample.token for sample in samples]


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "deepseek_v3", "llama4"])
def test_seeded_rows_draw_alike_alone_together_and_after_preemption(name: str) -> None:
    def lift() -> Lift:
        return Lift(make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1])

    alone = [tokens(lift().run([ride])[0]) for ride in RIDES]
    together = list(map(tokens, lift().run(RIDES)))
    stopped = list(map(tokens, lift().run(STOPPED)))
    assert [len(row) for row in alone] == [ride.tokens for ride in RIDES]
    assert together == alone
    assert stopped == alone
    assert alone[0] != alone[1], "seeds matter"
    assert alone[5] != alone[0][:12], "a greedy neighbour stays greedy"
    assert alone[5] == list(solo(name).answer(prompt(12), 12).tokens[:12])
