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


def test_on_cuda_every_usual_number_of_tokens_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.engine.models.warm.on_cuda", lambda: True)
    runner = FakeRunner()
    warm_up(runner, 200, 512)
    assert runner.stats().rows == 0 and not runner.violations
    alone = [len(plan.decode) for plan in runner.plans if plan.decode and not plan.prefill]
    assert alone[-48:] == list(range(48, 0, -1))
    prompts = [len(plan.prefill[0].tokens) for plan in runner.plans if len(plan.prefill) == 1]
    assert prompts[-16:] == list(range(32, 513, 32))


def test_rows_that_share_no_forward_need_no_numbers_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of so many would be as many forwards, over a thousand in all."""
    monkeypatch.setattr("chairlift.engine.models.warm.on_cuda", lambda: True)
    runner = FakeRunner()
    warm_up(runner, 200, 512, together=False)
    assert runner.stats().rows == 0 and not runner.violations
    assert sum(len(plan.decode) for plan in runner.plans) < 40
    assert [512] in [[len(span.tokens) for span in plan.prefill] for plan in runner.plans]


@pytest.mark.parametrize("name", ["llama", "mamba2", "deepseek_v3"])
@pytest.mark.parametrize("cuda", [False, True])
def test_a_model_holds_no_row_afterwards(name: str, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.engine.models.warm.on_cuda", lambda: cuda)
    family = FAMILIES[name]
    _, runner = make_runner(build(family), 128)
    warm_up(runner, 128)
    stats = runner.stats()
    assert (stats.rows, stats.kv_bytes) == (0, 0)
