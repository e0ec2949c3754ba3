"""What patches of single families do. That they are needed is in test_registry.py, parity in tests/mlx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import phi3small, rope_utils
from mlx_lm.models.cache import KVCache, make_prompt_cache

from chairlift.patches import apply_patches, undo_patches
from chairlift.patches.llama4 import ChunkMask
from chairlift.patches.parts import calling_by_parts
from chairlift.patches.phi3small import visible
from tests.mlx.configs import VOCABULARY
from tests.mlx.families import FAMILIES, Family, build


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    apply_patches()
    yield
    undo_patches()
    apply_patches()


def small(family: str) -> Any:
    """The family's small model. Its body alone is looked at, which needs no large vocabulary."""
    return build(Family(family, {**FAMILIES[family].config, "vocab_size": VOCABULARY}))


def prefill_and_decode(family: str) -> tuple[mx.array, mx.array]:
    """Hidden states of 70 tokens at once, and one by one."""
    model = small(family)
    tokens = mx.random.randint(0, 192, (1, 70), key=mx.random.key(1))
    whole = model.model(tokens, cache=make_prompt_cache(model))
    caches = make_prompt_cache(model)
    single = [model.model(tokens[:, at : at + 1], cache=caches) for at in range(70)]
    return whole, mx.concatenate(single, axis=1)


def apart(one: mx.array, other: mx.array) -> Any:
    return mx.abs(one - other).max().item()


def test_phi3small_prefill_equals_decode_and_upstream_does_not() -> None:
    assert apart(*prefill_and_decode("phi3small")) < 1e-4
    undo_patches()
    assert apart(*prefill_and_decode("phi3small")) > 1e-2


def test_phi3small_decode_is_upstreams() -> None:
    _, mended = prefill_and_decode("phi3small")
    undo_patches()
    _, upstream = prefill_and_decode("phi3small")
    assert apart(mended, upstream) < 1e-4


def test_phi3small_block_mask_of_one_token_is_upstreams() -> None:
    layer = small("phi3small").model.layers[0].self_attn
    assert isinstance(layer, phi3small.Attention) and layer.block_sparse
    for length in (1, 31, 32, 33, 64, 70, 130):
        _, upstream = layer._block_sparse_mask(1, length)
        own = visible(layer, mx.array([[length - 1]]), length)
        assert mx.array_equal(own[0, :, 0], upstream.reshape(layer.n_heads, length)), length


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("offsets", [(0, 3, 40), (61, 64, 200), (2, 63, 500)])
def test_dynamic_rope_of_rows_is_that_of_each_alone(traditional: bool, offsets: tuple[int, ...]) -> None:
    rope = rope_utils.DynamicNTKScalingRoPE(8, 64, traditional, 10000.0, 2.0)
    x = mx.random.normal((3, 2, 1, 12), key=mx.random.key(0))
    together = rope(x, mx.array(offsets, dtype=mx.int32))
    alone = mx.concatenate([rope(x[row : row + 1], offset) for row, offset in enumerate(offsets)])
    assert apart(together, alone) < 1e-4
    one_base = rope(x, max(offsets))
    assert apart(together, one_base) > 1e-2


def test_a_full_history_of_longcat_ngrams_changes_no_answer() -> None:
    whole, single = prefill_and_decode("longcat_flash_ngram")
    undo_patches()
    upstream, upstream_single = prefill_and_decode("longcat_flash_ngram")
    assert apart(whole, upstream) < 1e-5
    assert apart(single, upstream_single) < 1e-5


def test_chunk_mask_sees_the_own_chunk_up_to_the_own_token() -> None:
    class Cache:
        offset, start_position, trims = 5, 2, 0

        def maybe_trim_front(self) -> None:
            self.trims += 1

    cache = Cache()
    mask = ChunkMask(4).for_part(cache, 2)
    assert cache.trims == 1
    # keys 2..6, queries 5 and 6; chunks 0-3 and 4-7
    assert mask.tolist() == [[False, False, True, True, False], [False, False, True, True, True]]


def test_only_caches_that_go_by_parts_are_given_parts() -> None:
    def original(self: Any, x: mx.array, scale: float, mask: Any = None, cache: Any = None) -> Any:
        return ("original", scale, mask, cache)

    call = calling_by_parts(original)
    plain = KVCache()
    assert call(None, mx.zeros(1), 2.0, None, plain) == ("original", 2.0, None, plain)
    assert call(None, mx.zeros(1), 2.0, mask="causal") == ("original", 2.0, "causal", None)

    class View:
        def by_parts(self, attention: Any, mask: Any, arrays: Any, *, alone: bool) -> Any:
            assert (mask, len(arrays), alone) == ("view's", 1, False)
            return attention(arrays, "part's", plain)

    assert call(None, mx.zeros(1), 2.0, "view's", cache=View()) == ("original", 2.0, "part's", plain)
