"""SiLU on a CPU: right to float32's rounding, and in the models' graphs."""

from __future__ import annotations

import io

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from chairlift.patches.cpu_silu import SILU, silu


def reference(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide * np.exp(-np.logaddexp(0, -wide))


@pytest.mark.parametrize("reach", [1e-3, 1, 10, 100, 1e4])
def test_it_is_right(reach: float) -> None:
    x = np.linspace(-reach, reach, 20001, dtype=np.float32)
    error = np.abs(np.asarray(silu(mx.array(x))) - reference(x))
    assert (error <= 4e-7 * np.maximum(1, np.abs(x))).all()


def test_what_is_no_number_stays_none() -> None:
    got = np.asarray(silu(mx.array([np.nan, np.inf, 0.0])))
    assert np.isnan(got[0]) and got[1] == np.inf and got[2] == 0


def _graph(function: object) -> str:
    assert callable(function)
    dot = io.StringIO()
    mx.export_to_dot(dot, function(mx.ones((2, 2))))
    return dot.getvalue()


def test_the_patch_takes_its_place_for_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "silu", getattr(nn.silu, "__chairlift_original__", nn.silu))
    before = nn.silu(mx.array([1.0, -2.0], dtype=mx.bfloat16))
    with mx.stream(mx.cpu):
        assert SILU[0].apply()
        try:
            if mx.default_device() == mx.cpu:
                graph = _graph(lambda x: nn.silu(x))
                assert "Sigmoid" not in graph and "Divide" in graph
            assert mx.array_equal(nn.silu(mx.array([1.0, -2.0], dtype=mx.bfloat16)), before)
        finally:
            SILU[0].undo()
    if mx.default_device() == mx.cpu:
        assert "Divide" not in _graph(lambda x: nn.silu(x))
