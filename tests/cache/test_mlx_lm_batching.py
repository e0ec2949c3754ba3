"""mlx-lm's own batch machinery with the patch: every kind of cache, and its BatchGenerator over models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from chairlift.cache.mamba import (
    BatchMambaCache,
    ensure_mamba_support,
    make_batch_cache,
    patch_mlx_lm_for_mamba,
    to_batch_cache,
    undo_mlx_lm_for_mamba,
)
from chairlift.cache.mlx_lm_batching import MENDS, bounded_prompt_cache, is_recurrent
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


def written(value: float) -> ArraysCache:
    """A cache of two states full of `value`, and of `value` + 100."""
    cache = ArraysCache(2)
    for which in range(2):
        cache[which] = mx.full((1, 2 + which), value + 100 * which, dtype=mx.float32)
    return cache


def column(state: mx.array) -> list[float]:
    """The first number of every row."""
    return [float(row[0]) for row in state.tolist()]  # type: ignore[union-attr, index]


# the patch


def test_to_batch_cache_over_every_kind() -> None:
    nested = CacheList(ArraysCache(3), CacheList(KVCache(), RotatingKVCache(max_size=16)))
    batch = to_batch_cache(nested, [2, 0])
    assert type(batch[0]) is BatchMambaCache and len(batch[0].cache) == 3
    assert batch[0].left_padding.tolist() == [2, 0]
    assert type(batch[1][0]) is BatchKVCache and batch[1][0].left_padding.tolist() == [2, 0]
    assert type(batch[1][1]) is BatchRotatingKVCache and batch[1][1].max_size == 16


def test_to_batch_cache_keeps_to_max_kv_size() -> None:
    nested = CacheList(ArraysCache(2), KVCache(), RotatingKVCache(max_size=16))
    for bound, window in ((8, 8), (64, 16)):
        batch = to_batch_cache(nested, [0], max_kv_size=bound)
        assert type(batch[1]) is BatchRotatingKVCache and batch[1].max_size == bound
        assert batch[2].max_size == window


def test_to_batch_cache_names_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="ChunkedKVCache"):
        to_batch_cache(CacheList(ArraysCache(2), ChunkedKVCache(8)), [0])
    with pytest.raises(ValueError, match="RotatingKVCache with keep=4"):
        to_batch_cache(RotatingKVCache(max_size=8, keep=4), [0])
    with pytest.raises(ValueError, match="ArraysCache has content"):
        to_batch_cache(written(1), [0])


class Layers:
    """A model that names its caches, or only has layers."""

    def __init__(self, *caches: object) -> None:
        self.layers = [None] * 2
        if caches:
            self.make_cache = lambda: list(caches)


def test_make_batch_cache_of_models_with_and_without_caches_of_their_own() -> None:
    assert [type(c) for c in make_batch_cache(Layers(), [0])] == [BatchKVCache] * 2
    assert [c.max_size for c in make_batch_cache(Layers(), [0], max_kv_size=8)] == [8, 8]
    hybrid = make_batch_cache(Layers(ArraysCache(2), KVCache()), [1], max_kv_size=8)
    assert [type(c) for c in hybrid] == [BatchMambaCache, BatchRotatingKVCache]


def test_the_patch_is_needed_in_every_part() -> None:
    """Fails when upstream has mended one: drop it then."""
    assert [mend.name for mend in MENDS if not mend.faulty()] == []


def test_the_patch_mends_and_is_undone() -> None:
    before = [vars(mend.owner).get(mend.name) for mend in MENDS]
    assert patch_mlx_lm_for_mamba() is True
    once = [vars(mend.owner).get(mend.name) for mend in MENDS]
    assert patch_mlx_lm_for_mamba() is True
    ensure_mamba_support()
    ensure_mamba_support()
    assert [vars(mend.owner).get(mend.name) for mend in MENDS] == once
    assert all(new is not old for new, old in zip(once, before, strict=True))
    # `_make_cache` is not there upstream, so its absence is no fault that a mend could end.
    assert [mend.name for mend in MENDS if mend.faulty()] == ["_make_cache"]
    undo_mlx_lm_for_mamba()
    undo_mlx_lm_for_mamba()
    assert [vars(mend.owner).get(mend.name) for mend in MENDS] == before


def test_merging_through_mlx_lm(patched: None) -> None:
    full, window = KVCache(), RotatingKVCache(max_size=4)
    for cache in (full, window):
        cache.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    row = [written(1), full, window, CacheList(written(2), full)]
    fresh = [ArraysCache(2), KVCache(), RotatingKVCache(max_size=4), CacheList(ArraysCache(2), KVCache())]
    batch = generate._merge_caches([row, fresh])
    kinds = [BatchMambaCache, BatchKVCache, BatchRotatingKVCache, CacheList]
    assert [type(cache) for cache in batch] == kinds
    assert type(batch[3][0]) is BatchMambaCache and type(batch[3][1]) is BatchKVCache
    assert column(batch[0][0]) == [1, 0] and column(batch[3][0][0]) == [2, 0]
    assert type(ArraysCache.merge([written(1)])) is BatchMambaCache
    assert generate._merge_caches([]) == []


def test_extracting_unwritten_rows_through_mlx_lm(patched: None) -> None:
    fresh = [ArraysCache(2), CacheList(ArraysCache(1), KVCache()), RotatingKVCache(max_size=4)]
    batch = generate._merge_caches([fresh, fresh])
    state, nested, window = (cache.extract(1) for cache in batch)
    assert state.cache == [None, None] and nested[0].cache == [None]
    assert type(nested[1]) is KVCache and nested[1].empty()
    assert type(window) is RotatingKVCache and window.max_size == 4 and window.empty()


def test_nested_batches_keep_their_state(patched: None) -> None:
    batch = generate._merge_caches([[CacheList(written(1), KVCache())]])[0]
    other = CacheList()
    other.state = batch.state
    assert type(other[0]) is BatchMambaCache and column(other[0][0]) == [1]


def test_caches_that_cannot_merge_are_named(patched: None) -> None:
    for odd in (ChunkedKVCache(8), CacheList(ArraysCache(2), ChunkedKVCache(8))):
        with pytest.raises(ValueError, match="ChunkedKVCache"):
            generate._merge_caches([[odd], [odd]])
    with pytest.raises(ValueError, match="ArraysCache and KVCache"):
        generate._merge_caches([[KVCache()], [ArraysCache(2)]])
    with pytest.raises(ValueError, match="1 and 2 layers"):
        generate._merge_caches([[KVCache()], [KVCache(), KVCache()]])


def test_the_old_seam_is_there(patched: None) -> None:
    batch = generate._make_cache(Layers(ArraysCache(2), KVCache()), [0, 1], 8)
    assert [type(cache) for cache in batch] == [BatchMambaCache, BatchRotatingKVCache]


def test_max_kv_size_of_models_with_caches_of_their_own(patched: None) -> None:
    mixed = Layers(ArraysCache(2), KVCache(), CacheList(ArraysCache(2), KVCache()), RotatingKVCache(4))
    caches = generate.make_prompt_cache(mixed, 8)
    assert [type(c) for c in caches] == [ArraysCache, RotatingKVCache, CacheList, RotatingKVCache]
    assert caches[1].max_size == 8 and caches[2][1].max_size == 8 and caches[3].max_size == 4
    attention = Layers(KVCache())
    assert [type(c) for c in generate.make_prompt_cache(attention, 8)] == [KVCache]
    assert not hasattr(upstream.make_prompt_cache, "chairlift_original")
