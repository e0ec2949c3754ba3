"""mlx-lm's own BatchGenerator over recurrent and hybrid models, with the patch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, make_prompt_cache

from chairlift.cache.mamba import BatchMambaCache, patch_mlx_lm_for_mamba, undo_mlx_lm_for_mamba
from chairlift.cache.mlx_lm_batching import bounded_prompt_cache, is_recurrent
from tests.mlx.families import FAMILIES as SMALL
from tests.mlx.families import build

generate = importlib.import_module("mlx_lm.generate")

PROMPTS = [[5, 9, 3, 7, 2, 8, 4], [6], [1, 2, 3], [9, 9, 1, 4, 6, 2, 7, 3, 5, 8, 1, 2, 6], [4, 4]]
ANSWER = 6

FAMILIES = [
    "mamba",
    "mamba2",
    "rwkv7",
    "jamba",
    "qwen3_next",
    "falcon_h1",
    "kimi_linear",
    "recurrent_gemma",
    "baichuan_m1",
]
"""Pure, hybrid, nested lists of caches, four states to a layer, and beside rotating KV."""

PADDING_FLOWS = ["mamba", "rwkv7", "recurrent_gemma", "baichuan_m1"]


@pytest.fixture
def patched() -> Iterator[None]:
    patch_mlx_lm_for_mamba()
    yield
    undo_mlx_lm_for_mamba()


def solo(model: nn.Module, prompt: list[int], max_kv_size: int | None = None) -> list[int]:
    """Greedy tokens of one request on plain caches, prompt in one piece."""
    cache = bounded_prompt_cache(model, max_kv_size) if max_kv_size else make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
    tokens = [prompt[-1]]
    for _ in range(ANSWER):
        logits = model(mx.array([tokens[-1:]]), cache=cache)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    return tokens[1:]


def batched(model: nn.Module, prompts: list[list[int]], **options: int) -> list[list[int]]:
    """Greedy tokens from BatchGenerator; the last two prompts join when the others are under way."""
    generator = generate.BatchGenerator(model, max_tokens=ANSWER, **options)
    uids = generator.insert(prompts[:-2])
    answers: dict[int, list[int]] = {}
    for step in range(40):
        if step == 3:
            uids += generator.insert(prompts[-2:])
        for response in generator.next()[1]:
            answers.setdefault(response.uid, []).append(int(response.token))
    generator.close()
    return [answers[uid] for uid in uids]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_any_length_answer_as_alone(patched: None, name: str) -> None:
    model = build(SMALL[name])
    assert batched(model, PROMPTS) == [solo(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", PADDING_FLOWS)
def test_without_the_patch_they_do_not(name: str) -> None:
    """Padding flows into the states of these families."""
    model = build(SMALL[name])
    assert batched(model, PROMPTS) != [solo(model, prompt) for prompt in PROMPTS]


def test_prompts_in_small_chunks(patched: None) -> None:
    model = build(SMALL["qwen3_next"])
    assert batched(model, PROMPTS, prefill_step_size=2) == [solo(model, prompt) for prompt in PROMPTS]


def test_attention_models_are_left_to_upstream(patched: None) -> None:
    model = build(SMALL["llama"])
    assert not any(is_recurrent(cache) for cache in make_prompt_cache(model))
    assert batched(model, PROMPTS) == [solo(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_max_kv_size_bounds_hybrid_models(patched: None, name: str) -> None:
    model = build(SMALL[name])
    generator = generate.BatchGenerator(model, max_tokens=ANSWER, max_kv_size=8)
    generator.insert(PROMPTS)
    generator.next()
    caches = [
        part for cache in generator._prompt_batch.prompt_cache for part in getattr(cache, "caches", [cache])
    ]
    assert {type(cache) for cache in caches} == {BatchMambaCache, BatchRotatingKVCache}
    assert all(cache.max_size == 8 for cache in caches if isinstance(cache, BatchRotatingKVCache))
    generator.close()
    assert batched(model, PROMPTS, max_kv_size=8) == [solo(model, prompt, 8) for prompt in PROMPTS]


def test_caches_come_out_and_go_on(patched: None) -> None:
    """A row removed in mid-answer continues from its extracted cache."""
    model = build(SMALL["jamba"])
    generator = generate.BatchGenerator(model, max_tokens=ANSWER)
    uids = generator.insert(PROMPTS)
    answer: list[int] = []
    while len(answer) < 3:
        answer += [int(r.token) for r in generator.next()[1] if r.uid == uids[0]]
    cache, known = generator.remove([uids[0]], return_prompt_caches=True)[uids[0]]
    generator.close()
    whole = PROMPTS[0] + solo(model, PROMPTS[0])
    assert known == whole[: len(known)]
    again = generate.BatchGenerator(model, max_tokens=2)
    again.insert([[whole[len(known)]]], caches=[cache])
    tokens = []
    while len(tokens) < 2:
        tokens += [int(r.token) for r in again.next()[1]]
    again.close()
    assert tokens == whole[len(known) + 1 : len(known) + 3]
