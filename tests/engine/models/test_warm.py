"""The steps before the first request follow the runner's protocol and leave nothing behind."""

from __future__ import annotations

import pytest

from chairlift.engine.models.build import make_runner
from chairlift.engine.models.warm import warm_up
from tests.fakes import FakeRunner
from tests.mlx.families import FAMILIES, build


def test_the_plans_are_as_the_protocol_wants_them() -> None:
    runner = FakeRunner()
    warm_up(runner, 200)  # the fake raises on a plan out of order
    assert runner.stats().rows == 0


@pytest.mark.parametrize("name", ["llama", "mamba2", "deepseek_v3"])
def test_a_model_holds_no_row_afterwards(name: str) -> None:
    family = FAMILIES[name]
    _, runner = make_runner(build(family), 128)
    warm_up(runner, 128)
    stats = runner.stats()
    assert (stats.rows, stats.kv_bytes) == (0, 0)
