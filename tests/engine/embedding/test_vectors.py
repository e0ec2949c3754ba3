"""Lengths, dimensions and angles."""

from __future__ import annotations

import numpy as np
import pytest

from chairlift.engine.embedding.vectors import normalised, similarities

VECTORS = np.array([[3, 4, 12], [0, -2, 0], [0, 0, 0]], np.float32)


def test_scaled_to_length_1() -> None:
    assert normalised(VECTORS).tolist() == pytest.approx(
        np.array([[3 / 13, 4 / 13, 12 / 13], [0, -1, 0], [0, 0, 0]])
    )
    assert normalised(VECTORS).dtype == np.float32


def test_cut_first_and_scaled_then() -> None:
    assert normalised(VECTORS, 2).tolist() == pytest.approx(np.array([[0.6, 0.8], [0, -1], [0, 0]]))
    assert normalised(VECTORS, 3).tolist() == normalised(VECTORS).tolist()


def test_cosines() -> None:
    others = np.array([[6, 8, 24], [-3, -4, -12], [4, -3, 0], [0, 0, 0]], np.float32)
    assert similarities(VECTORS[:1], others) == pytest.approx([1, -1, 0, 0], abs=1e-7)
    assert similarities(others[:2], VECTORS[:2]) == pytest.approx([1, 4 / 13], abs=1e-7)
    tiny = np.array([[1e-30, 1e-30]], np.float32)
    assert similarities(tiny, tiny * 3) == pytest.approx([1])
