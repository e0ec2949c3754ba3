"""PLaMo 3's sliding window: an answer does not depend on where its prompt's chunks end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import plamo3

from chairlift.patches.plamo3 import patch_plamo3_window, undo_plamo3_window
from tests.mlx.configs import WINDOW
from tests.mlx.parity import solo
from tests.mlx.solo import prompt


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    patch_plamo3_window()
    yield
    patch_plamo3_window()


def last_logits(chunks: Sequence[int]) -> np.ndarray:
    """After a prompt longer than the window, prefilled in such chunks and then token by token."""
    model: Any = solo("plamo3").model
    tokens = mx.array([prompt(3 * WINDOW, 1)])
    caches, start = model.make_cache(), 0
    for chunk in [*chunks, *[1] * (tokens.shape[1] - sum(chunks))]:
        logits = model(tokens[:, start : start + chunk], cache=caches)
        start += chunk
    return np.array(logits[0, -1])


CHUNKS = ([WINDOW, WINDOW], [20, 20], [5], [3 * WINDOW - 1])


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_do_not_matter(chunks: list[int]) -> None:
    np.testing.assert_allclose(last_logits(chunks), last_logits([3 * WINDOW]), rtol=0, atol=1e-4)


def test_upstream_forgets_one_token_too_early() -> None:
    undo_plamo3_window()
    whole = last_logits([3 * WINDOW])
    assert all(np.abs(last_logits(chunks) - whole).max() > 1e-2 for chunks in CHUNKS)


def test_whole_prompts_are_as_before() -> None:
    patched = last_logits([3 * WINDOW])
    undo_plamo3_window()
    np.testing.assert_array_equal(last_logits([3 * WINDOW]), patched)


def test_it_is_applied_once_and_undone() -> None:
    first = plamo3.Model.make_cache
    assert patch_plamo3_window()
    assert plamo3.Model.make_cache is first
    sizes = {getattr(cache, "max_size", None) for cache in solo("plamo3").model.make_cache()}
    assert sizes == {None, WINDOW + 1}
    undo_plamo3_window()
    original = plamo3.Model.make_cache
    undo_plamo3_window()
    assert plamo3.Model.make_cache is original is not first
