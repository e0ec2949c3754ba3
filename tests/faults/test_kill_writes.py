"""Servers that are killed while they write prefixes: `python -m tests.faults.kill_writes` in short."""

from __future__ import annotations

import pytest

from tests.faults.kill_writes import kill

pytestmark = pytest.mark.slow


def test_three_kills() -> None:
    outcome = kill(3, seed=1, families=["llama"])
    assert outcome.kills == 3 and outcome.compared >= 9
    assert outcome.wrong == []
    assert outcome.cached_tokens > 0 and outcome.files > 0
