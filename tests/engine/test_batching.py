"""How a model may share a step is found by trying it, and models that are wrong in a batch are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache, make_prompt_cache

from chairlift.engine.batching import Batching
from chairlift.engine.models.batching import find_batching, split_head
from chairlift.engine.models.build import make_runner
from chairlift.patches import apply_patches
from tests.engine.stepping import Rider, answers
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, REQUIRED, build
from tests.mlx.parity import finding, solo
from tests.mlx.solo import Solo, prompt

ATTENTION_ALONE = {
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
}
"""Of the required families."""


@pytest.mark.parametrize("name", REQUIRED)
def test_required_families(name: str) -> None:
    found = finding(name)
    assert not found.whole_prompts
    if name in ATTENTION_ALONE:
        assert (found.batching, found.reasons) == (Batching.FLAT, ())
    else:
        reason = (Batching.FLAT, "Recurrent layers need the sequence axis.")
        assert (found.batching, found.reasons) == (Batching.HYBRID, (reason,))


Twist = Callable[[mx.array, mx.array, list[Any]], mx.array]
"""(logits, tokens `[batch, length]`, caches) -> what the model says instead."""


class Twisted(nn.Module):
    """A small llama with a twist."""

    def __init__(self, twist: Twist, make: Callable[[], Any] = KVCache) -> None:
        super().__init__()
        self.base = solo("llama").model
        self.twist = twist
        self.make = make

    def make_cache(self) -> list[Any]:
        return [self.make() for _ in self.base.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.twist(self.base(tokens, cache=cache), tokens, cache)


@pytest.fixture(autouse=True)
def patched() -> None:
    apply_patches()


def reasons_of(found: Any) -> dict[Batching, str]:
    return dict(found.reasons)


def test_an_honest_model_is_flat() -> None:
    assert find_batching(Twisted(lambda logits, tokens, _: logits), VOCABULARY).batching is Batching.FLAT


def statistics_beyond(rows: int) -> Twist:
    """Mixes in what the rest of the batch says, where it is larger than `rows`."""

    def twist(logits: mx.array, tokens: mx.array, _: list[Any]) -> mx.array:
        if tokens.shape[0] <= rows:
            return logits
        return logits + 0.01 * logits.mean(axis=0, keepdims=True)

    return twist


def test_batch_statistics_that_only_flat_steps_meet_are_found_out() -> None:
    """A flat step of the trial has dozens of rows, the others three."""
    found = find_batching(Twisted(statistics_beyond(3)), VOCABULARY)
    assert found.batching is Batching.HYBRID
    assert reasons_of(found).keys() == {Batching.FLAT}
    assert reasons_of(found)[Batching.FLAT].startswith("Logits differ from solo runs by ")


def test_batch_statistics_everywhere_leave_each_row_by_itself() -> None:
    found = find_batching(Twisted(statistics_beyond(1)), VOCABULARY)
    assert found.batching is Batching.SOLO
    assert reasons_of(found).keys() == {Batching.FLAT, Batching.HYBRID, Batching.DENSE, Batching.ROWS}


TWISTS: dict[str, Twist] = {
    "rows in another order": lambda logits, tokens, _: mx.roll(logits, 1, axis=0),
    "the first row's numbers for all": lambda logits, tokens, _: mx.broadcast_to(logits[:1], logits.shape),
    "not a number in a batch": lambda logits, tokens, _: logits if tokens.shape[0] == 1 else logits * mx.nan,
    "one position for all rows": lambda logits, tokens, cache: (
        logits + 0.1 * mx.max(mx.array(cache[0].offset))
    ),
    "a slip of one in a thousand": lambda logits, tokens, _: logits * (1 if tokens.shape[0] == 1 else 1.001),
}


@pytest.mark.parametrize("name", TWISTS)
def test_a_model_that_is_wrong_in_any_batch_is_served_row_by_row(name: str) -> None:
    found = find_batching(Twisted(TWISTS[name]), VOCABULARY)
    assert found.batching is Batching.SOLO
    assert all("differ" in reason for reason in reasons_of(found).values())


def test_a_model_that_raises_in_a_batch_is_served_row_by_row_and_says_why() -> None:
    def twist(logits: mx.array, tokens: mx.array, _: list[Any]) -> mx.array:
        if tokens.shape[0] > 1:
            raise IndexError("only one")
        return logits

    found = find_batching(Twisted(twist), VOCABULARY)
    assert found.batching is Batching.SOLO
    assert set(reasons_of(found).values()) == {"IndexError: only one"}


def test_a_model_that_reads_the_offset_as_an_integer_is_served_row_by_row() -> None:
    """As many of mlx-lm's do; in a batch it is an array."""
    found = find_batching(
        Twisted(lambda logits, tokens, cache: logits + 0.001 * int(cache[0].offset)), VOCABULARY
    )
    assert found.batching is Batching.SOLO


def test_prompts_whose_chunks_matter_are_given_in_one_piece() -> None:
    def twist(logits: mx.array, tokens: mx.array, _: list[Any]) -> mx.array:
        return logits if tokens.shape[1] == 1 else logits * (1 + 0.01 * tokens.shape[1])

    found = find_batching(Twisted(twist), VOCABULARY)
    assert (found.batching, found.whole_prompts) == (Batching.SOLO, True)


def test_a_model_that_raises_on_a_second_chunk_is_given_its_prompts_in_one_piece() -> None:
    def twist(logits: mx.array, tokens: mx.array, caches: list[Any]) -> mx.array:
        if tokens.shape[1] > 1 and caches[0].offset > tokens.shape[1]:
            raise ValueError("This model wants its prompt whole.")
        return logits

    found = find_batching(Twisted(twist), VOCABULARY)
    assert (found.batching, found.whole_prompts) == (Batching.SOLO, True)


def test_a_cache_of_another_kind_does_not_share_a_block() -> None:
    found = find_batching(Twisted(lambda logits, tokens, _: logits, lambda: ChunkedKVCache(64)), VOCABULARY)
    assert found.batching not in (Batching.FLAT, Batching.HYBRID, Batching.DENSE)
    assert "ChunkedKVCache cannot share a batch" in reasons_of(found)[Batching.FLAT]


def test_a_tiny_vocabulary_can_be_tried() -> None:
    config = {**FAMILIES["llama"].config, "vocab_size": 2}
    assert find_batching(build(replace(FAMILIES["llama"], config=config)), 2).batching is Batching.FLAT


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss"])
def test_a_plain_head_is_split(name: str) -> None:
    model = build(FAMILIES[name])
    split = split_head(model, VOCABULARY)
    assert split is not None
    body, head = split
    tokens = mx.array([[5, 6, 7]])
    want = model(tokens, cache=make_prompt_cache(model))
    assert mx.array_equal(head(body(tokens, cache=make_prompt_cache(model))), want)


SCALED = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "minicpm": {"dim_model_base": 16},
    "gemma2": {"final_logit_softcapping": 30.0},
}
"""Families whose model does more than its head, with numbers that show."""


def scaled(name: str) -> nn.Module:
    return build(replace(FAMILIES[name], config={**FAMILIES[name].config, **SCALED[name]}))


@pytest.mark.parametrize("name", SCALED)
def test_a_head_with_scaling_stays_with_its_body(name: str) -> None:
    model = scaled(name)
    assert split_head(model, VOCABULARY) is None
    found, runner = make_runner(model, VOCABULARY)
    assert found.batching is Batching.FLAT
    riders = [Rider(prompt(length, 1), 6) for length in (9, 4, 20)]
    reference = Solo(model)
    want = [list(reference.answer(rider.prompt, 6).tokens[:6]) for rider in riders]
    assert answers(runner, riders) == want


def test_a_model_without_a_body_is_not_split() -> None:
    assert split_head(Twisted(lambda logits, tokens, _: logits), VOCABULARY) is None


def test_a_body_that_cannot_be_called_alone_is_not_split() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = lambda tokens: tokens
            self.lm_head = lambda hidden: hidden
            self.layers: list[Any] = []

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            return tokens

    assert split_head(Odd(), VOCABULARY) is None
