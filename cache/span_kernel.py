"""Attention of all prompt chunks of a flat step in one launch, on CUDA.

The chunks of several rows lie one after the other in the step, and each row's keys and values in a cache of
its own. A thread block takes 64 queries (tokens times the query heads that share a KV head) of one chunk and
goes over the keys that they may see, in tiles, with an online softmax: no scores in memory, no masks, and
shapes that stay the same whatever the lengths are. Products run on tensor cores, sums are float32. Source of
the scheme: Dao, FlashAttention-2, 2023.

Used where `span_kernel_available` says that it agrees with the reference on this machine; elsewhere each
chunk is computed by itself (`chairlift.cache.prefill`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from chairlift.cache.device import on_cuda
from chairlift.cache.span_source import HEADER, SOURCE

HEAD_DIMS = (64, 96, 128, 192, 256)
QUERIES = 64
"""Queries of a thread block: four warps of 16."""
MOST = 16
"""Chunks that a launch takes; more are several launches. One number, since each would be compiled by itself,
seconds each."""
FAR = 1 << 29
"""A position behind all keys."""
CAPACITY = 320
"""Tokens of the self-test's caches."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk among the tokens of a step, and the keys it may see.

    Attributes:
        start: its first token in the step.
        tokens: how many it has.
        held: keys there are, of which the last `tokens` are its own.
        capacity: tokens that the arrays of its keys and values have room for.
        offset: position of its first token; FAR if it may see all keys, in whatever order they lie.
        first: position of the first key.
        window: tokens, the own one included, that attention may look back; 0 for all.
    """

    start: int
    tokens: int
    held: int
    capacity: int
    offset: int
    first: int
    window: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.start, self.tokens, self.held, self.capacity, self.offset, self.first, self.window


def chunk_of(
    start: int, tokens: int, offset: int, held: int, capacity: int, window: int | None, ring: bool
) -> Chunk:
    """The chunk of a row at position `offset`; a single token in a ring sees all of it, in any order."""
    if ring and tokens == 1:
        return Chunk(start, tokens, held, capacity, FAR, 0, 0)
    return Chunk(start, tokens, held, capacity, offset, offset + tokens - held, window or 0)


def table_of(chunks: Sequence[Chunk], group: int, padding: int) -> list[int]:
    """What a launch reads: tokens that it writes, first token in the step, the chunks' numbers (MOST of
    them, the first repeated), then a pair for each thread block: chunk and first query; chunk -1 and their
    number for the padding."""
    tiles = [
        number
        for index, chunk in enumerate(chunks)
        for row in range(0, chunk.tokens * group, QUERIES)
        for number in (index, row)
    ]
    # Long loops first: a block that starts last should have little to do.
    pairs = sorted(
        zip(tiles[::2], tiles[1::2], strict=True),
        key=lambda pair: -_keys_seen(chunks[pair[0]], pair[1] // group),
    )
    if padding:
        pairs.append((-1, padding))
    numbers = [chunks[index if index < len(chunks) else 0].numbers for index in range(MOST)]
    tokens = sum(chunk.tokens for chunk in chunks) + padding
    return [
        tokens,
        chunks[0].start,
        *(n for chunk in numbers for n in chunk),
        *(n for pair in pairs for n in pair),
    ]


def _keys_seen(chunk: Chunk, token: int) -> int:
    seen = min(chunk.held, chunk.offset - chunk.first + token + QUERIES)
    return min(seen, chunk.window + QUERIES) if chunk.window else seen


@functools.cache
def _kernel() -> Any:
    cases = "\n".join(
        f"case {index}: keys = (const unsigned short*)keys_{index}; "
        f"values = (const unsigned short*)values_{index}; break;"
        for index in range(1, MOST)
    )
    first = "default: keys = (const unsigned short*)keys_0; values = (const unsigned short*)values_0;"
    return mx.fast.cuda_kernel(
        name="chairlift_spans",
        input_names=[
            "queries",
            "table",
            "scale",
            "sinks",
            *(f"{name}_{index}" for index in range(MOST) for name in ("keys", "values")),
        ],
        output_names=["out"],
        source=SOURCE.replace("POINTERS", f"{cases}\n{first}"),
        header=HEADER,
    )


def attend_chunks(
    queries: mx.array,
    chunks: Sequence[Chunk],
    arrays: Sequence[tuple[mx.array, mx.array]],
    *,
    scale: float,
    sinks: mx.array | None = None,
    padding: int = 0,
    known: dict[Any, Any] | None = None,
) -> mx.array:
    """Attention of all chunks of a step.

    Args:
        queries: `[tokens, heads, 1, head_dim]` of the whole step, bfloat16 or float16.
        chunks: one after the other in the step.
        arrays: keys and values of each, `[1, kv_heads, capacity, head_dim]`, of the queries' type.
        scale: multiplies the scores.
        sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
        padding: tokens behind the chunks that get zeros.
        known: keeps what is the same for other layers of the step.

    Returns:
        `[tokens of the chunks and the padding, heads, 1, head_dim]`.
    """
    known = {} if known is None else known
    parts = []
    for at in range(0, len(chunks), MOST):
        last = at + MOST >= len(chunks)
        part = slice(at, at + MOST)
        parts.append(
            _launch(queries, chunks[part], arrays[part], scale, sinks, padding if last else 0, known)
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _launch(
    queries: mx.array,
    chunks: Sequence[Chunk],
    arrays: Sequence[tuple[mx.array, mx.array]],
    scale: float,
    sinks: mx.array | None,
    padding: int,
    known: dict[Any, Any],
) -> mx.array:
    _, heads, _, dim = queries.shape
    kv_heads = arrays[0][0].shape[1]
    group = heads // kv_heads
    key = ("chunks", tuple(chunks), group, padding)
    if key not in known:
        numbers = table_of(chunks, group, padding)
        known[key] = mx.array(numbers, dtype=mx.int32), (len(numbers) - 2 - 7 * MOST) // 2
    table, blocks = known[key]
    scales = known.setdefault(("scale", scale), mx.array([scale], dtype=mx.float32))
    padded = [*arrays, *[arrays[0]] * (MOST - len(arrays))]
    (out,) = _kernel()(
        inputs=[
            queries,
            table,
            scales,
            sinks if sinks is not None else scales,
            *(array for pair in padded for array in pair),
        ],
        template=[
            ("D", dim),
            ("HQ", heads),
            ("G", group),
            ("BN", 64 if dim <= 128 else 32),
            ("SPANS", MOST),
            ("BF", queries.dtype == mx.bfloat16),
            ("SINKS", sinks is not None),
        ],
        grid=(128 * blocks, kv_heads, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(sum(chunk.tokens for chunk in chunks) + padding, heads, 1, dim)],
        output_dtypes=[queries.dtype],
    )
    return out  # type: ignore[no-any-return]


@functools.cache
def span_kernel_available(
    head_dim: int, heads: int, kv_heads: int, dtype: mx.Dtype, sinks: bool = False
) -> bool:
    """Whether the kernel runs here for such heads and agrees with the reference. Tried once per process,
    which also compiles it."""
    if head_dim not in HEAD_DIMS or dtype not in (mx.bfloat16, mx.float16) or heads % kv_heads:
        return False
    if not on_cuda():
        return False
    try:
        return _agrees(head_dim, heads, kv_heads, dtype, sinks)
    except Exception:
        return False


def _agrees(head_dim: int, heads: int, kv_heads: int, dtype: mx.Dtype, with_sinks: bool) -> bool:
    """With chunks of different lengths, offsets and windows; tokens of others before them."""
    before, padding = 3, 5
    chunks, start = list[Chunk](), before
    for tokens, offset, window in ((7, 0, 0), (70, 90, 0), (1, 41, 50), (33, 200, 50), (1, 63, 0)):
        chunks.append(chunk_of(start, tokens, offset, offset + tokens, CAPACITY, window, ring=False))
        start += tokens
    draw = functools.partial(mx.random.normal, dtype=mx.float32)
    queries = draw((start + padding, heads, 1, head_dim), key=mx.random.key(1)).astype(dtype)
    sinks = draw((heads,), key=mx.random.key(0)).astype(dtype) if with_sinks else None
    shape, keys = (1, kv_heads, CAPACITY, head_dim), iter(mx.random.split(mx.random.key(2), 2 * len(chunks)))
    arrays = [
        (draw(shape, key=next(keys)).astype(dtype), draw(shape, key=next(keys)).astype(dtype)) for _ in chunks
    ]
    scale = head_dim**-0.5
    got = attend_chunks(queries, chunks, arrays, scale=scale, sinks=sinks, padding=padding)
    got = got.astype(mx.float32)
    want = [
        reference(queries, chunk, *pair, scale, sinks) for chunk, pair in zip(chunks, arrays, strict=True)
    ]
    want.append(mx.zeros((padding, heads, 1, head_dim)))
    return bool((mx.abs(got - mx.concatenate(want)).max() < 0.03).item())


def reference(
    queries: mx.array,
    chunk: Chunk,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """One chunk's attention as it is written, in float32: `[tokens, heads, 1, head_dim]`."""
    own = queries[chunk.start : chunk.start + chunk.tokens, :, 0].swapaxes(0, 1)[None].astype(mx.float32)
    group = own.shape[1] // keys.shape[1]
    shown = (mx.repeat(a[:, :, : chunk.held].astype(mx.float32), group, axis=1) for a in (keys, values))
    keys, values = shown
    scores = (own * scale) @ keys.swapaxes(-1, -2)
    places = chunk.first + mx.arange(chunk.held)
    at = chunk.offset + mx.arange(chunk.tokens)[:, None]
    seen = places <= at
    if chunk.window:
        seen = seen & (places > at - chunk.window)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        weights = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    return (weights @ values)[0].swapaxes(0, 1)[:, :, None]
