"""The verdict of `python -m tests.faults.soak`, by hand; and a moment of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.soak import Reading, series_of, soak
from tests.mlx.test_vision_http import write_model

MIB = 2**20
FLAT = Reading(0, 200 * MIB, 50 * MIB, 10 * MIB, 400, 300, 0)


def verdicts(*readings: Reading) -> dict[str, bool]:
    return {one.name: one.flat for one in series_of(readings)}


def test_what_stays_or_falls_is_flat_and_what_rises_in_the_warm_up_too() -> None:
    assert all(verdicts(*[FLAT] * 30).values())
    assert all(verdicts(replace(FLAT, resident=MIB, buffers=1), *[FLAT] * 29).values())
    assert all(verdicts(*[FLAT] * 15, *[replace(FLAT, resident=MIB, kept=1)] * 15).values())


@pytest.mark.parametrize("name", ["resident", "active", "cached", "buffers", "kept"])
def test_what_rises_slowly_is_told(name: str) -> None:
    rising = [replace(FLAT, **{name: int(getattr(FLAT, name) * (1 + step / 2))}) for step in range(30)]
    found = verdicts(*rising)
    assert not found.pop(name) and all(found.values())


@pytest.mark.slow
async def test_a_moment_of_it_goes_well(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_5")
    done = await soak(model, tmp_path / "prefixes", 0.1, 3, pause=0.01, every=1)
    assert not done.failed and done.asked.total() > 0
    assert done.readings and all(reading.buffers > 50 and reading.active > MIB for reading in done.readings)
