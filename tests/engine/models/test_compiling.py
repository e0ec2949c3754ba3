"""The trial that says whether a model's decode steps may be compiled."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.models.compiling import compiled_steps
from chairlift.patches import apply_patches
from tests.mlx.configs import VOCABULARY
from tests.mlx.parity import solo

LOGGER = "chairlift.engine.models.compiling"


def tried(family: str, change: Any = lambda logits, caches: logits) -> bool:
    apply_patches()
    model = solo(family).model

    def forward(tokens: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = change(model(tokens, cache=caches), caches)
        return logits

    return compiled_steps(forward, lambda: make_prompt_cache(model), VOCABULARY) is not None


def test_a_model_whose_steps_agree() -> None:
    assert tried("llama")


def test_a_number_in_the_trace_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """It is another one in every call, so a trace repeats the first."""
    calls: list[int] = []

    def drifts(logits: mx.array, caches: list[Any]) -> mx.array:
        calls.append(1)
        return logits if logits.shape[1] > 1 else logits + (1000.0 if len(calls) > 6 else 0.0)

    with caplog.at_level(logging.INFO, LOGGER):
        assert not tried("llama", drifts)
    assert "differ by" in caplog.text


def test_a_model_that_asks_for_such_a_number(caplog: pytest.LogCaptureFixture) -> None:
    def counts(logits: mx.array, caches: list[Any]) -> mx.array:
        return logits if logits.shape[1] > 1 else logits + caches[0]._idx

    with caplog.at_level(logging.INFO, LOGGER):
        assert not tried("llama", counts)
    assert "NotTraceable" in caplog.text


def test_attention_by_the_models_own_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert not tried("gemma2")
    assert "own code" in caplog.text


def test_layers_with_states(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        assert not tried("qwen3_5")
    assert "Not every layer" in caplog.text
