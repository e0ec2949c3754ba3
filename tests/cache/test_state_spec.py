"""The contract's part 3, by its public names."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from chairlift.cache.mamba import BatchMambaCache
from chairlift.cache.state_spec import MambaStateSpec, specs_for, state_spec_for
from chairlift.patches.registry import PATCHES, undo_all
from tests.mlx.families import FAMILIES, build
from tests.patches.qwen35 import make_model

DTYPES = (
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.complex64,
    *((mx.float64,) if mx.default_device() == mx.cpu else ()),
)


def spec(*states: tuple[tuple[int, ...], mx.Dtype], block_size: int = 4, **options: object) -> MambaStateSpec:
    shapes = tuple(shape for shape, _ in states)
    dtypes = tuple(dtype for _, dtype in states)
    return MambaStateSpec(shapes, dtypes, "mamba2", block_size, **options)  # type: ignore[arg-type]


def from_bytes(data: bytes, rows: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array whose memory is `data`; any bit pattern."""
    raw = mx.array(np.frombuffer(data, dtype=np.uint8))
    return (raw % 2 if dtype == mx.bool_ else raw).view(dtype).reshape(rows, *shape)


def bits(array: mx.array) -> bytes:
    """An array's memory."""
    if array.size == 0:
        return b""
    return np.array(array.reshape(-1).view(mx.uint8)).tobytes()


# the spec itself


def test_it_is_frozen_and_hashable() -> None:
    one = spec(((3, 8), mx.bfloat16), ((4, 2, 2), mx.float32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.kind = "rwkv"  # type: ignore[misc]
    other = MambaStateSpec([[3, 8], [4, 2, 2]], [mx.bfloat16, mx.float32], "mamba2", 4)  # type: ignore[arg-type]
    assert one == other and hash(one) == hash(other)
    assert one.page_size_padded is None and one.cache_mode == "none" and one.num_speculative_blocks == 0


def test_page_size_is_all_states_or_the_padded_size() -> None:
    states = ((3, 8), mx.bfloat16), ((4, 2, 2), mx.float32)
    assert spec(*states).page_size_bytes == 3 * 8 * 2 + 4 * 2 * 2 * 4
    assert spec(*states, page_size_padded=112).page_size_bytes == 112
    assert spec(*states, page_size_padded=4096).page_size_bytes == 4096
    with pytest.raises(ValueError, match="111 < 112"):
        spec(*states, page_size_padded=111)


@pytest.mark.parametrize(
    "changes",
    [
        {"shapes": ((1,), (2,))},
        {"shapes": (), "dtypes": ()},
        {"shapes": ((-1,),)},
        {"cache_mode": "some"},
        {"block_size": 0},
        {"num_speculative_blocks": -1},
    ],
)
def test_nonsense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(spec(((1,), mx.float32)), **changes)


def test_speculative_blocks_reserve_pages() -> None:
    one = spec(((8,), mx.float32))
    assert one.pages_per_row == 1 and one.row_bytes == 32
    four = spec(((8,), mx.float32), num_speculative_blocks=3, page_size_padded=40)
    assert four.pages_per_row == 4 and four.row_bytes == 160


@pytest.mark.parametrize(
    ("start", "end", "align", "every"),
    [
        (0, 3, (), ()),
        (0, 4, (4,), (4,)),
        (0, 13, (12,), (4, 8, 12)),
        (4, 8, (8,), (8,)),
        (4, 7, (), ()),
        (5, 17, (16,), (8, 12, 16)),
        (8, 8, (), ()),
    ],
)
def test_checkpoint_boundaries(start: int, end: int, align: tuple[int, ...], every: tuple[int, ...]) -> None:
    modes = {mode: spec(((8,), mx.float32), cache_mode=mode) for mode in ("none", "align", "all")}
    assert modes["none"].checkpoint_boundaries(start, end) == ()
    assert modes["align"].checkpoint_boundaries(start, end) == align
    assert modes["all"].checkpoint_boundaries(start, end) == every
    assert [mode.reusable for mode in modes.values()] == [False, True, True]
    assert [mode.checkpoint_bytes(13) for mode in modes.values()] == [0, 32, 96]


# pages


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_unpack_of_pack_is_bit_equal_for_every_dtype(data: st.DataObject) -> None:
    """Random bytes: NaN payloads, -0.0, denormals and all; states at odd offsets; empty and scalar states."""
    rows = data.draw(st.integers(0, 3), "rows")
    shape = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (5, 1, 2)])
    states = data.draw(st.lists(st.tuples(shape, st.sampled_from(DTYPES)), min_size=1, max_size=4), "states")
    pad = data.draw(st.integers(0, 9), "pad")
    one = spec(*states)
    one = dataclasses.replace(one, page_size_padded=one.page_size_bytes + pad)
    arrays = []
    for shape_, dtype in states:
        size = rows * math.prod(shape_) * dtype.size
        raw = data.draw(st.binary(min_size=size, max_size=size), "bytes")
        arrays.append(from_bytes(raw, rows, shape_, dtype))
    page = one.pack(arrays)
    assert page.dtype == mx.uint8 and page.shape == (rows, one.page_size_bytes)
    for got, expected in zip(one.unpack(page), arrays, strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert bits(got) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_behind_one_odd_byte(dtype: mx.Dtype) -> None:
    one = spec(((1,), mx.uint8), ((3, 5), dtype))
    raw = bytes((7 * k + 129) % 256 for k in range(2 * 15 * dtype.size))
    states = [mx.array([[1], [255]], dtype=mx.uint8), from_bytes(raw, 2, (3, 5), dtype)]
    page = one.pack(states)
    assert [bits(state) for state in one.unpack(page)] == [bits(state) for state in states]
    for row in range(2):
        single = one.unpack(page[row : row + 1])
        assert [bits(state) for state in single] == [bits(state[row : row + 1]) for state in states]


def test_special_floats_keep_their_bits() -> None:
    numbers = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000]
    state = mx.array(numbers, dtype=mx.uint32).view(mx.float32)[None]
    one = spec(((6,), mx.float32))
    assert one.unpack(one.pack([state]))[0].view(mx.uint32).tolist() == [numbers]


def test_states_lie_side_by_side_in_order_then_zeros() -> None:
    one = spec(((2,), mx.uint8), ((1,), mx.uint16), page_size_padded=6)
    page = one.pack(
        [mx.array([[1, 2], [3, 4]], dtype=mx.uint8), mx.array([[0x0605], [0x0807]], dtype=mx.uint16)]
    )
    assert page.tolist() == [[1, 2, 5, 6, 0, 0], [3, 4, 7, 8, 0, 0]]


def test_states_of_any_strides_pack() -> None:
    base = mx.arange(24, dtype=mx.int32).reshape(2, 3, 4)
    one = spec(((4, 3), mx.int32), ((3, 2), mx.int32))
    states = [base.swapaxes(1, 2), base[:, :, ::2]]
    assert [state.tolist() for state in one.unpack(one.pack(states))] == [state.tolist() for state in states]


def test_pages_can_come_from_a_pool() -> None:
    """A page at an odd address in a larger buffer."""
    one = spec(((1,), mx.uint8), ((2,), mx.float32))
    pages = one.pack([mx.array([[1], [2]], dtype=mx.uint8), mx.array([[1.5, -0.0], [2.5, 3.5]])])
    pool = mx.concatenate([mx.zeros((3,), dtype=mx.uint8), pages.reshape(-1)])
    small, large = one.unpack(pool[3 + 9 : 3 + 18].reshape(1, 9))
    assert small.tolist() == [[2]] and large.tolist() == [[2.5, 3.5]]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([mx.zeros((1, 2))], "1 states for a spec of 2"),
        ([mx.zeros((1, 2)), None], "state 1 is not written"),
        ([mx.zeros((1, 2)), mx.zeros((1, 3))], r"state 1 .*float32 \(1, 3\), not .*bfloat16 of rows \(3,\)"),
        ([mx.zeros((1, 4)), mx.zeros((1, 3), dtype=mx.bfloat16)], "state 0"),
        ([mx.zeros((1, 2)), mx.zeros((2, 3), dtype=mx.bfloat16)], r"states of \[1, 2\] rows"),
    ],
)
def test_pack_refuses_other_states(states: list[mx.array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(((2,), mx.float32), ((3,), mx.bfloat16)).pack(states)


@pytest.mark.parametrize(
    "page", [mx.zeros((1, 9), dtype=mx.uint8), mx.zeros((8,), dtype=mx.uint8), mx.zeros((1, 8))]
)
def test_unpack_refuses_other_pages(page: mx.array) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[rows, 8\]"):
        spec(((2,), mx.float32)).unpack(page)


# live caches and models


def test_spec_of_a_live_cache() -> None:
    cache = BatchMambaCache(left_padding=[0, 0])
    cache[0] = mx.zeros((2, 3, 8), dtype=mx.bfloat16)
    with pytest.raises(ValueError, match="state 1 of BatchMambaCache is not written"):
        state_spec_for(cache)
    cache[1] = mx.zeros((2, 4, 16, 16))
    one = state_spec_for(cache, kind="mamba2", block_size=32, cache_mode="align", num_speculative_blocks=2)
    assert one.shapes == ((3, 8), (4, 16, 16)) and one.dtypes == (mx.bfloat16, mx.float32)
    assert (one.kind, one.block_size, one.cache_mode) == ("mamba2", 32, "align")
    assert one.num_speculative_blocks == 2
    page = one.pack(cache.cache)
    assert page.shape == (2, one.page_size_bytes)
    assert state_spec_for(CacheList(cache, KVCache())).shapes == one.shapes
    assert state_spec_for(cache.extract(1)).shapes == one.shapes


def test_attention_caches_have_no_spec() -> None:
    for cache in (KVCache(), CacheList(KVCache())):
        with pytest.raises(ValueError, match=type(cache).__name__):
            state_spec_for(cache)


KINDS = {
    "mamba": "mamba1",
    "jamba": "mamba1",
    "mamba2": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "nemotron_h": "mamba2",
    "plamo2": "mamba2",
    "lfm2": "short_conv",
    "lfm2_moe": "short_conv",
    "baichuan_m1": "short_conv",
    "qwen3_next": "gated_delta",
    "qwen3_5": "gated_delta",
    "qwen3_5_moe": "gated_delta",
    "kimi_linear": "gated_delta",
    "olmo_hybrid": "gated_delta",
    "rwkv7": "rwkv",
    "recurrent_gemma": "rg_lru",
    "bailing_moe_linear": "linear_attention",
}


@pytest.mark.parametrize("name", KINDS)
def test_specs_of_every_recurrent_family(name: str) -> None:
    model = build(FAMILIES[name])
    specs = specs_for(model, block_size=16)
    caches = [
        part
        for cache in make_prompt_cache(model)
        for part in getattr(cache, "caches", [cache])
        if isinstance(part, ArraysCache)
    ]
    assert len(specs) == len(caches) > 0
    assert {one.kind for one in specs} == {KINDS[name]} and {one.block_size for one in specs} == {16}
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]), cache=cache)
    live = [part for c in cache for part in getattr(c, "caches", [c]) if isinstance(part, ArraysCache)]
    for one, part in zip(specs, live, strict=True):
        states = one.unpack(one.pack(part.cache))
        assert [bits(state) for state in states] == [bits(state) for state in part.cache]


def test_state_dtypes_follow_the_model() -> None:
    """The recurrence stays float32 where the convolution is bfloat16."""
    model = build(FAMILIES["qwen3_5"])
    model.set_dtype(mx.bfloat16)
    assert specs_for(model)[0].dtypes == (mx.bfloat16, mx.float32)


def test_attention_models_have_no_specs() -> None:
    assert specs_for(build(FAMILIES["llama"])) == []
    assert specs_for(build(FAMILIES["gemma3_text"])) == []


def test_states_that_grow_are_refused() -> None:
    undo_all([patch for patch in PATCHES if patch.name == "longcat_flash_ngram"])
    with pytest.raises(ValueError, match="grow with the tokens"):
        specs_for(build(FAMILIES["longcat_flash_ngram"]))


def test_specs_of_an_mlx_vlm_model() -> None:
    model = make_model("qwen3_5")
    specs = specs_for(model)
    assert [one.kind for one in specs] == ["gated_delta"] * 2
    assert {one.shapes for one in specs} == {((3, 128), (4, 16, 16))}
    assert model.language_model._rope_deltas is None and model.language_model._position_ids is None


class Remembering(nn.Module):
    """A model that keeps something of each call on itself, and whose class nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def make_cache(self) -> list[ArraysCache]:
        return [ArraysCache(1)]

    def __call__(self, tokens: mx.array, cache: list[ArraysCache]) -> None:
        self.last = tokens
        self.more = 1
        cache[0][0] = mx.zeros((tokens.shape[0], 2))


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = Remembering()
    (one,) = specs_for(model)
    assert one.kind == "recurrent" and one.shapes == ((2,),)
    assert model.last is None and not hasattr(model, "more")
