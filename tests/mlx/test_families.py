"""The small models are fit to show a fault: their answers vary and depend on early tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.mlx.families import FAMILIES, NOT_ON_CPU, REQUIRED, build
from tests.mlx.parity import solo
from tests.mlx.solo import prompt


def test_models_are_seeded_and_in_float32() -> None:
    one, two, other = (build(FAMILIES["llama"], seed) for seed in (0, 0, 1))
    for (name, first), (_, second) in zip(
        tree_flatten(one.parameters()), tree_flatten(two.parameters()), strict=True
    ):
        assert first.dtype == mx.float32, name
        assert mx.array_equal(first, second), name
    assert not mx.array_equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_ON_CPU])
def test_answers_vary_and_depend_on_the_first_token(name: str) -> None:
    model = solo(name).model
    tokens = prompt(40)
    answer = solo(name).answer(tokens, 32 if name in REQUIRED else 16)
    assert len(set(answer.tokens)) >= (8 if name in REQUIRED else 5)
    other = (tokens[0] + 1, *tokens[1:])
    logits = [model(mx.array([row]), cache=make_prompt_cache(model))[0, -1, :192] for row in (tokens, other)]
    assert mx.abs(logits[0] - logits[1]).max().item() > 1e-2
