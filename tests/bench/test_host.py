"""bench/host.py: what is counted for which part."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm")

from chairlift.engine.scheduler import Scheduler
from tests.bench.scripts import script

host = script("host")


def test_a_part_is_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def work(nanoseconds: int) -> None:
        nonlocal now
        now += nanoseconds

    monkeypatch.setattr(host.time, "thread_time_ns", lambda: now)
    meter = host.Meter()
    inner = meter.timed("inner", lambda: work(30))

    def both() -> str:
        work(5)
        inner()
        inner()
        work(2)
        return "done"

    assert meter.timed("outer", both)() == "done"
    assert dict(meter.spent) == {"inner": 60, "outer": 7}
    with pytest.raises(ZeroDivisionError):
        meter.timed("outer", lambda: work(1 // 0))()
    assert meter.spent["outer"] == 7


def test_what_is_watched_is_put_back() -> None:
    before = Scheduler.schedule
    with host.Meter().watching():
        assert Scheduler.schedule is not before
    assert Scheduler.schedule is before


def test_a_report_adds_up_all_but_mlx() -> None:
    text = host.report({"greedy": dict.fromkeys(host.PARTS, 1000.0)})
    assert "| text | 1,000 |" in text and "| dispatch | 1,000 |" in text
    assert text.endswith(f"| all but the last two | {len(host.PARTS) - 2},000 |")
