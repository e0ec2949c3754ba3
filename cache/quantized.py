"""Keys and values kept in 8 or 4 bits.

Each group of 64 numbers of a token's key or value (32 where a head is no multiple of 64) is stored as codes,
a scale and a bias: `mx.quantize`, mode affine. A token is quantized when its layer stores it, before anything
attends to it, in prefill as in decode, and its groups hold nothing of other tokens. So what a row holds is a
function of its own tokens alone: not of the chunks its prompt came in, not of the rows around it, not of when
it joined the batch or was started again. Codes are made once and then only copied.

Sources: `mlx_lm.models.cache.QuantizedKVCache` and `quantized_scaled_dot_product_attention`, mlx-lm 0.32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from chairlift.cache.attention import CohortKV, Planes, fill, temporal
from chairlift.cache.kinds import Kind, kind_of
from chairlift.cache.step import CohortStep

BITS = {"int8": 8, "int4": 4}
"""Bits of a code by the name of the type."""

PARTS = 3
"""Codes, scales, biases."""


class UnsupportedQuantization(ValueError):
    """A model whose keys and values cannot be kept quantized; the message is a clause that says why."""


def group_size(width: int) -> int:
    """Numbers that share a scale, in heads of `width` numbers.

    Raises:
        UnsupportedQuantization: no group fits.
    """
    for size in (64, 32):
        if width % size == 0:
            return size
    raise UnsupportedQuantization(f"its heads of {width} numbers are not a multiple of 32")


def encode(array: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases of `[..., width]`."""
    codes, scales, biases = mx.quantize(array, group_size=group_size(array.shape[-1]), bits=bits)
    return codes, scales, biases


def decode(parts: Sequence[mx.array], bits: int) -> mx.array:
    """The numbers that codes, scales and biases stand for."""
    codes, scales, biases = parts
    return mx.dequantize(codes, scales, biases, group_size=group_size(_width(codes, bits)), bits=bits)


class QuantizedRow:
    """One request's quantized cache of one layer, as a model takes it.

    Codes, scales and biases lie in a cache of the layer's own class each, and the model gets the numbers that
    they stand for. So its attention runs as on any other cache, prefill through the fused attention, and one
    layer's numbers are in memory at a time.

    Args:
        bits: of a code, 8 or 4.
        make: a fresh cache of the layer's class, full or sliding.
    """

    def __init__(self, bits: int, make: Callable[[], Any]) -> None:
        # Not called `bits`: upstream's attention would take what comes back for codes.
        self.code_bits = bits
        self.make = make
        self.parts: tuple[Any, ...] = tuple(make() for _ in range(PARTS))

    @classmethod
    def take(cls, cache: QuantizedKVCache) -> QuantizedRow:
        """What mlx-lm's own quantized cache holds, code for code.

        Raises:
            ValueError: groups of another size.
        """
        row = cls(cache.bits, KVCache)
        if cache.keys is None:
            return row
        pairs = [
            tuple(array[:, :, : cache.offset] for array in pair)
            for pair in zip(cache.keys, cache.values, strict=True)
        ]
        if any(group_size(_width(codes, cache.bits)) != cache.group_size for codes in pairs[0]):
            raise ValueError(f"A quantized cache with groups of {cache.group_size} cannot join.")
        for part, pair in zip(row.parts, pairs, strict=True):
            fill(part, pair, cache.offset)
        return row

    def give(self) -> QuantizedKVCache:
        """The same as mlx-lm's own quantized cache, code for code, for full attention.

        Raises:
            ValueError: a sliding window, or groups of two sizes: mlx-lm has no cache for these.
        """
        if kind_of(self.parts[0]) is not Kind.FULL:
            raise ValueError("mlx-lm quantizes no sliding window.")
        cache = QuantizedKVCache(bits=self.code_bits)
        if self.offset:
            keys, values = zip(*(part.keys_and_values() for part in self.parts), strict=True)
            sizes = {group_size(_width(side[0], self.code_bits)) for side in (keys, values)}
            if len(sizes) > 1:
                raise ValueError("mlx-lm's quantized cache has one size of groups.")
            cache.group_size = sizes.pop()
            cache.keys, cache.values, cache.offset = keys, values, self.offset
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store `[1, kv_heads, tokens, head_dim]`; what the layer's own cache would return, quantized."""
        new = zip(encode(keys, self.code_bits), encode(values, self.code_bits), strict=True)
        pairs = zip(self.parts, new, strict=True)
        return self._decoded([part.update_and_fetch(*pair) for part, pair in pairs])

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._decoded([part.keys_and_values() for part in self.parts])

    def _decoded(self, pairs: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
        keys, values = zip(*pairs, strict=True)
        return decode(keys, self.code_bits), decode(values, self.code_bits)

    # Where its tokens lie is the same in every part.

    @property
    def offset(self) -> int:
        return int(self.parts[0].offset)

    @property
    def _idx(self) -> int:
        return int(self.parts[0]._idx)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.parts[0].make_mask(*args, **kwargs)

    def size(self) -> int:
        return int(self.parts[0].size())

    def empty(self) -> bool:
        return bool(self.parts[0].empty())

    def is_trimmable(self) -> bool:
        return bool(self.parts[0].is_trimmable())

    def trim(self, tokens: int) -> int:
        """Forget the last tokens; how many."""
        return [int(part.trim(tokens)) for part in self.parts][0]

    @property
    def state(self) -> list[Any]:
        """Of the parts."""
        return [part.state for part in self.parts]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class QuantizedKV(CohortKV):
    """Storage of one attention layer in codes, scales and biases.

    Args:
        row: a request's cache of the layer.
    """

    def __init__(self, row: QuantizedRow) -> None:
        super().__init__(getattr(row.parts[0], "max_size", None))
        self._bits = row.code_bits
        self._make = row.make

    def encoded(self, keys: mx.array, values: mx.array) -> Planes:
        """Keys' and values' codes, then scales, then biases."""
        pairs = zip(encode(keys, self._bits), encode(values, self._bits), strict=True)
        return [array for pair in pairs for array in pair]

    def planes_of(self, cache: Any) -> Planes:
        row = QuantizedRow.take(cache) if isinstance(cache, QuantizedKVCache) else cache
        if not isinstance(row, QuantizedRow) or row.code_bits != self._bits:
            raise ValueError(f"A row joins from a cache of {self._bits} bits.")
        return [array for part in row.parts for array in temporal(part)]

    def buffers_of(self, cache: Any) -> Planes:
        if not isinstance(cache, QuantizedRow):
            return self.planes_of(cache)
        return [array for part in cache.parts for array in (part.keys, part.values)]

    def filled(self, planes: Planes, tokens: int) -> QuantizedRow:
        row = QuantizedRow(self._bits, self._make)
        for index, part in enumerate(row.parts):
            fill(part, planes[2 * index : 2 * index + 2], tokens)
        return row

    def arrays(self, cohort: int) -> tuple[mx.array, mx.array]:
        planes = self.blocks[cohort].planes
        return decode(planes[0::2], self._bits), decode(planes[1::2], self._bits)

    @property
    def stores_late(self) -> bool:
        return False

    def visible(self, step: CohortStep) -> tuple[mx.array, mx.array]:
        """Raises: UnsupportedQuantization."""
        raise UnsupportedQuantization("its attention does arithmetic on the keys themselves")

    def attend(
        self,
        step: CohortStep,
        queries: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None = None,
        new: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """As `CohortKV.attend`, of tokens that are stored: upstream's products with codes where these are
        right on this machine, else the usual attention over the numbers of one cohort at a time.

        Raises:
            UnsupportedQuantization: for `sinks`.
        """
        if sinks is not None:
            raise UnsupportedQuantization("its attention has sinks, which quantized attention lacks")
        planes = self.blocks[step.key].planes
        keys, values = planes[0::2], planes[1::2]
        width = queries.shape[-1]
        group = queries.shape[1] // keys[0].shape[1]
        # Upstream takes values for as wide as keys.
        alike = width == _width(values[0], self._bits)
        if not alike or not products_agree(width, group, self._bits, queries.dtype):
            return super().attend(step, queries, scale, window)
        longest = self._longest(step)
        out: mx.array = quantized_scaled_dot_product_attention(
            queries[step.fill] if step.holes else queries[:],  # scaled in place
            tuple(array[: step.used, :, :longest] for array in keys),
            tuple(array[: step.used, :, :longest] for array in values),
            scale=scale,
            mask=step.mask(self.window, window),
            group_size=group_size(width),
            bits=self._bits,
        )
        return out[step.slots] if step.holes else out


@functools.cache
def products_agree(width: int, group: int, bits: int, dtype: mx.Dtype) -> bool:
    """Whether upstream's attention over codes agrees with that over the numbers here, for heads of `width`
    numbers, `group` of them to a head of keys.

    Tried once per process, over few and many tokens: mlx on Metal has returned zeros for some sizes
    (ml-explore/mlx issue 4250), and on CUDA it lacks others."""
    try:
        return all(_agree(width, group, bits, dtype, tokens) for tokens in (70, 1100, 4100))
    except Exception:
        return False


def _agree(width: int, group: int, bits: int, dtype: mx.Dtype, tokens: int) -> bool:
    rows, heads, scale = 2, 2, width**-0.5
    queries, keys, values = (
        mx.random.normal((rows, count, length, width), key=mx.random.key(seed)).astype(dtype)
        for seed, (count, length) in enumerate(((heads * group, 1), (heads, tokens + 3), (heads, tokens + 3)))
    )
    stored = [tuple(part[:, :, :tokens] for part in encode(array, bits)) for array in (keys, values)]
    mask = mx.arange(tokens) < mx.array([tokens, tokens // 2 + 1])[:, None, None, None]
    got = quantized_scaled_dot_product_attention(
        queries[:], *stored, scale=scale, mask=mask, group_size=group_size(width), bits=bits
    )
    numbers = [decode(parts, bits).astype(mx.float32) for parts in stored]
    want = mx.fast.scaled_dot_product_attention(queries.astype(mx.float32), *numbers, scale=scale, mask=mask)
    error = mx.abs(got.astype(mx.float32) - want).max()
    return bool((error < (1e-4 if dtype == mx.float32 else 0.02)).item())


def quantized_caches(caches: Sequence[Any], bits: int) -> list[Any]:
    """Fresh caches of a request, the attention layers' quantized; recurrent states stay as they are.

    Raises:
        UnsupportedQuantization: a kind of cache that cannot be quantized, or none that can.
    """
    quantized = [_quantized(cache, bits) for cache in caches]
    if not any(_has_rows(cache) for cache in quantized):
        raise UnsupportedQuantization("it keeps no keys and values")
    return quantized


def _quantized(cache: Any, bits: int) -> Any:
    kind, single = kind_of(cache), cast("Callable[..., Any]", type(cache))
    if kind is Kind.FULL:
        return QuantizedRow(bits, single)
    if kind is Kind.ROTATING and not cache.keep:
        return QuantizedRow(bits, functools.partial(single, max_size=cache.max_size))
    if kind is Kind.NESTED:
        return single(*(_quantized(part, bits) for part in cache.caches))
    if kind is Kind.RECURRENT:
        return cache
    raise UnsupportedQuantization(f"its caches of type {type(cache).__name__} are of a kind of their own")


def _has_rows(cache: Any) -> bool:
    if kind_of(cache) is Kind.NESTED:
        return any(_has_rows(part) for part in cache.caches)
    return isinstance(cache, QuantizedRow)


def _width(codes: mx.array, bits: int) -> int:
    """Numbers that a row of codes stands for."""
    return codes.shape[-1] * 32 // bits
