"""A flood of bad input in small: `python -m tests.faults.flood` is the large one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.exchange import request_bytes
from tests.faults.fake_server import fake_serving
from tests.faults.flood import GOOD, NO_HTTP, OPTIONS, Flood, changed_bytes, changed_value

BAD = 200


def times(count: int) -> Callable[[], bool]:
    """True so many times."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(GOOD))
def test_what_is_changed_is_something_else(draw: random.Random, good: tuple[str, dict[str, object]]) -> None:
    path, body = good
    request, before = request_bytes(path, body), repr(body)
    assert isinstance(changed_bytes(draw, request), bytes)
    request_bytes(path, changed_value(draw, body))
    assert repr(body) == before


@pytest.mark.slow
async def test_good_requests_stay_right_and_nothing_is_a_500() -> None:
    with fake_serving(OPTIONS) as served:
        flood = Flood(served)
        await flood.run(7, times(BAD), clients=8)
        served.process.terminate()
        assert served.exit_code() == 0
        assert set(served.complaints.splitlines()) <= {NO_HTTP}
    assert flood.faults == []
    assert flood.right > 0
    assert flood.statuses[400] > BAD / 10 and flood.statuses[200] > 0
