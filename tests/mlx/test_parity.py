"""The first law: a row's tokens are those of a solo run, whatever joins, leaves, is cancelled or preempted.

Float32, greedy, exact tokens and log probabilities, against mlx-lm's own `generate_step`, for every family
of mlx-lm of which a small model can be built.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cache.batch import RecurrentLayer
from chairlift.cache.layout import CohortLayout
from chairlift.cache.step import DecodeStep
from chairlift.engine.batching import Batching
from tests.mlx.families import FAMILIES, NOT_ON_CPU, ONE_BY_ONE, REQUIRED
from tests.mlx.lift import Ride
from tests.mlx.parity import Parity, finding, measure, solo
from tests.mlx.schedules import FULL, SHORT
from tests.mlx.solo import prompt

LENGTHS = (1, 2, 3, 8, 15, 16, 17, 31, 64, 65, 130, 200)
TOKENS = 24
KINDS = ("llama", "gemma3_text", "gpt_oss", "gemma2", "deepseek_v3", "mamba2", "qwen3_5", "baichuan_m1")


def assert_exact(parity: Parity) -> None:
    assert parity.failures == {}
    assert parity.missing == ()
    assert parity.differences == ()
    assert (parity.after.rows, parity.after.kv_bytes) == (0, 0)


@pytest.mark.parametrize("name", REQUIRED)
def test_required_families_in_a_full_schedule(name: str) -> None:
    assert finding(name).batching is not Batching.SOLO, "parity of rows that share nothing shows nothing"
    assert_exact(measure(name, FULL))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REQUIRED])
def test_every_other_family_in_a_short_schedule(name: str) -> None:
    if name in NOT_ON_CPU:
        pytest.skip("runs on Metal only")
    assert (finding(name).batching is Batching.SOLO) == (name in ONE_BY_ONE)
    assert not finding(name).whole_prompts
    assert_exact(measure(name, SHORT))


@pytest.mark.parametrize("batching", Batching)
def test_every_way_of_batching_suits_a_plain_model(batching: Batching) -> None:
    assert_exact(measure("llama", FULL, batching))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Ride, ...]:
    """Up to nine rows of any length, joined, chunked, cancelled and preempted anyhow."""
    steps = st.integers(0, 40)
    return tuple(
        Ride(
            prompt(draw(st.sampled_from(LENGTHS))),
            join=draw(st.integers(0, 12)),
            tokens=draw(st.integers(1, TOKENS)),
            chunks=tuple(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3))),
            cancel=draw(st.none() | steps),
            preempt=tuple(draw(st.lists(steps, max_size=3, unique=True))),
        )
        for _ in range(draw(st.integers(1, 9)))
    )


@pytest.mark.parametrize("name", KINDS)
def test_any_schedule(name: str) -> None:
    for length in LENGTHS:
        solo(name).answer(prompt(length), TOKENS)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(schedules())
    def any_schedule(schedule: tuple[Ride, ...]) -> None:
        assert_exact(measure(name, schedule))

    any_schedule()


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_keep_moving_between_cohorts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.cache.layout.STEP", 8)
    monkeypatch.setattr("chairlift.cache.batch.FLOOR", 8)
    cohorts = []

    class Counted(DecodeStep):
        def __init__(self, layout: CohortLayout) -> None:
            super().__init__(layout)
            cohorts.append(len(self.cohorts))

    assert finding(name).batching is not Batching.SOLO
    monkeypatch.setattr("chairlift.cache.batch.DecodeStep", Counted)
    assert_exact(measure(name, FULL))
    assert max(cohorts) == 1 if finding(name).batching is Batching.DENSE else max(cohorts) > 3


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_wrong_mask_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding(name).batching is not Batching.SOLO
    monkeypatch.setattr("chairlift.cache.step.CohortStep.mask", lambda *_: None)
    assert measure(name, FULL).differences != ()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "rwkv7"])
def test_the_state_of_another_row_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding(name).batching is not Batching.SOLO
    arrange = RecurrentLayer.arrange
    monkeypatch.setattr(
        RecurrentLayer, "arrange", lambda self, keep, joined: arrange(self, keep, joined[::-1])
    )
    assert measure(name, FULL).differences != ()
