"""Decode attention over rows of any lengths in one launch, on CUDA.

One new token per row attends to its own slot of a block up to its own length: no mask, no padding read, and
shapes that stay the same from step to step. Flash decoding: a thread block takes one row, one KV head (with
up to four query heads) and `split` tokens, keeps an online softmax in registers, and a second kernel joins
the splits. Sums are float32. Source of the scheme: Dao et al., Flash-Decoding, 2023.

Used behind `AttendView` where `ragged_available` says that it agrees with the reference on this machine;
elsewhere attention is `mx.fast.scaled_dot_product_attention` under a mask.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.cache.device import on_cuda

HEAD_DIMS = (64, 128, 256)
THREADS = 128
TARGET_BLOCKS = 1024
"""Thread blocks that fill a large card; splits are made smaller until there are about as many."""

_PARTIAL = """
    constexpr int LANES = D / 16;          // lanes that share a token, 16 elements each
    constexpr int GROUPS = 128 / LANES;    // tokens in flight
    constexpr int U = 2;                   // tokens a group loads ahead
    constexpr int CHUNKS = G / GQ;
    constexpr float LOG2E = 1.4426950408889634f;
    const int split = blockIdx.x;
    const int kv_head = blockIdx.y / CHUNKS;
    const int first_head = kv_head * G + (blockIdx.y % CHUNKS) * GQ;
    const int row = blockIdx.z;
    const int splits = gridDim.x;
    const int lane = threadIdx.x % LANES;
    const int group = threadIdx.x / LANES;
    const int capacity = keys_shape[2];
    const int held = min(lengths[row], capacity);
    const int window = limits[0], tokens = limits[1];
    const int at_new = NEW ? (lengths[row] - 1) % capacity : -1;
    const T* new_key = new_keys + ((size_t)row * HKV + kv_head) * D;
    const T* new_value = new_values + ((size_t)row * HKV + kv_head) * D;
    const int begin = (window > 0 ? max(0, held - window) : 0) + split * tokens;
    const int end = min(held, begin + tokens);

    if (begin >= end) {
        if (threadIdx.x < GQ) {
            float* out = stats + (((size_t)row * HQ + first_head + threadIdx.x) * splits + split) * 2;
            out[0] = -1e30f;
            out[1] = 0.0f;
        }
        return;
    }

    float q[GQ][16], acc[GQ][16], m[GQ], l[GQ];
    const float factor = scale[0] * LOG2E;
    for (int g = 0; g < GQ; ++g) {
        const T* source = queries + ((size_t)row * HQ + first_head + g) * D;
        for (int i = 0; i < 16; ++i) {
            q[g][i] = (float)source[(i / 8) * (D / 2) + lane * 8 + i % 8] * factor;
            acc[g][i] = 0.0f;
        }
        m[g] = -1e30f;
        l[g] = 0.0f;
    }
    const size_t base = ((size_t)slots[row] * HKV + kv_head) * capacity * D;
    if (NEW && at_new >= begin && at_new < end && blockIdx.y % CHUNKS == 0) {
        // Nobody reads this place of the block in this launch: all take the new token from where it comes.
        uint4* k = (uint4*)(keys + base + (size_t)at_new * D);
        uint4* v = (uint4*)(values + base + (size_t)at_new * D);
        for (int i = threadIdx.x; i < D / 8; i += 128) {
            k[i] = ((const uint4*)new_key)[i];
            v[i] = ((const uint4*)new_value)[i];
        }
    }
    for (int at = begin; at < end; at += GROUPS * U) {
        uint4 kv[U][4];
        for (int u = 0; u < U; ++u) {
            const int t = at + u * GROUPS + group;
            if (t < end) {
                const uint4* k = (const uint4*)(t == at_new ? new_key : keys + base + (size_t)t * D);
                const uint4* v = (const uint4*)(t == at_new ? new_value : values + base + (size_t)t * D);
                kv[u][0] = k[lane];
                kv[u][1] = k[D / 16 + lane];
                kv[u][2] = v[lane];
                kv[u][3] = v[D / 16 + lane];
            } else {
                for (int i = 0; i < 4; ++i) kv[u][i] = make_uint4(0, 0, 0, 0);
            }
        }
        for (int u = 0; u < U; ++u) {
            const bool valid = at + u * GROUPS + group < end;
            const T* k = (const T*)&kv[u][0];
            const T* v = (const T*)&kv[u][2];
            float kf[16];
            for (int i = 0; i < 16; ++i) kf[i] = (float)k[i];
            float s[GQ];
            for (int g = 0; g < GQ; ++g) {
                s[g] = 0.0f;
                for (int i = 0; i < 16; ++i) s[g] += q[g][i] * kf[i];
            }
            for (int g = 0; g < GQ; ++g) {
                for (int step = LANES / 2; step > 0; step /= 2) {
                    s[g] += __shfl_xor_sync(0xffffffffu, s[g], step);
                }
            }
            for (int i = 0; i < 16; ++i) kf[i] = (float)v[i];
            for (int g = 0; g < GQ; ++g) {
                const float score = valid ? s[g] : -1e30f;
                const float top = fmaxf(m[g], score);
                const float shrink = exp2f(m[g] - top);
                const float p = valid ? exp2f(score - top) : 0.0f;
                l[g] = l[g] * shrink + p;
                for (int i = 0; i < 16; ++i) acc[g][i] = acc[g][i] * shrink + p * kf[i];
                m[g] = top;
            }
        }
    }

    __shared__ float all_acc[GROUPS * GQ * D];
    __shared__ float all_m[GROUPS * GQ];
    __shared__ float all_l[GROUPS * GQ];
    for (int g = 0; g < GQ; ++g) {
        for (int i = 0; i < 16; ++i) {
            all_acc[(group * GQ + g) * D + (i / 8) * (D / 2) + lane * 8 + i % 8] = acc[g][i];
        }
        if (lane == 0) {
            all_m[group * GQ + g] = m[g];
            all_l[group * GQ + g] = l[g];
        }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < GQ * D; index += 128) {
        const int g = index / D, d = index % D;
        float top = -1e30f;
        for (int i = 0; i < GROUPS; ++i) top = fmaxf(top, all_m[i * GQ + g]);
        float sum = 0.0f, total = 0.0f;
        for (int i = 0; i < GROUPS; ++i) {
            const float weight = exp2f(all_m[i * GQ + g] - top);
            sum += weight * all_acc[(i * GQ + g) * D + d];
            total += weight * all_l[i * GQ + g];
        }
        const size_t out = ((size_t)row * HQ + first_head + g) * splits + split;
        partial[out * D + d] = sum;
        if (d == 0) {
            stats[out * 2] = top;
            stats[out * 2 + 1] = total;
        }
    }
"""

_JOIN = """
    constexpr float LOG2E = 1.4426950408889634f;
    const int d = threadIdx.x;
    const int head = blockIdx.y, row = blockIdx.z;
    const int splits = partial_shape[2];
    const size_t at = ((size_t)row * HQ + head) * splits;
    float top = SINKS ? (float)sinks[head] * LOG2E : -1e30f;
    for (int i = 0; i < splits; ++i) top = fmaxf(top, stats[(at + i) * 2]);
    float sum = 0.0f;
    float total = SINKS ? exp2f((float)sinks[head] * LOG2E - top) : 0.0f;
    for (int i = 0; i < splits; ++i) {
        const float count = stats[(at + i) * 2 + 1];
        if (count > 0.0f) {
            const float weight = exp2f(stats[(at + i) * 2] - top);
            total += weight * count;
            sum += weight * partial[(at + i) * D + d];
        }
    }
    out[((size_t)row * HQ + head) * D + d] = (T)(sum / total);
"""


@functools.cache
def _kernels() -> tuple[Any, Any]:
    partial = mx.fast.cuda_kernel(
        name="chairlift_ragged_partial",
        input_names=[
            *("queries", "keys", "values", "slots", "lengths", "limits", "scale"),
            *("new_keys", "new_values"),
        ],
        output_names=["partial", "stats"],
        source=_PARTIAL,
        # A copy of a block, made since it is not contiguous, would be written into in the block's place.
        ensure_row_contiguous=False,
    )
    join = mx.fast.cuda_kernel(
        name="chairlift_ragged_join",
        input_names=["partial", "stats", "sinks"],
        output_names=["out"],
        source=_JOIN,
    )
    return partial, join


def ragged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    lengths: mx.array,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    new: tuple[mx.array, mx.array] | None = None,
    constants: dict[Any, mx.array] | None = None,
) -> mx.array:
    """Attention of one new token per row.

    With `new` the tokens are written into the blocks as they lie, past mlx's ownership of arrays. One of its
    own operations has to copy a whole block whenever the step before, which reads it, is not over on the
    device: always, where the device is slower than the host. Whoever reads a block afterwards has to depend
    on the output (`mx.depends`), and nothing may hold a block that is to stay as it is; what was taken out of
    it before, in the same stream, stays.

    Args:
        queries: `[rows, heads, 1, head_dim]`, bfloat16 or float16.
        keys, values: whole blocks `[slots, kv_heads, capacity, head_dim]`, of the same type, contiguous.
        slots: int32 `[rows]`, each row's slot.
        lengths: int32 `[rows]`, tokens each row sees, its new one included; what exceeds the capacity lies in
            a ring that is full.
        longest: the largest of `lengths`, on the host.
        scale: multiplies the scores.
        window: tokens visible at most; None for all. Not for rings.
        sinks: `[heads]`, one more logit per head that takes weight and gives nothing.
        new: keys and values of the new tokens, `[rows, kv_heads, 1, head_dim]`, yet to be put into the
            blocks: each at the last of its row's `lengths`, modulo the capacity.
        constants: keeps the scalars' arrays for the next call, if the caller does.

    Returns:
        `[rows, heads, 1, head_dim]`.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    shared = max(size for size in (1, 2, 3, 4) if group % size == 0)
    seen = min(longest, capacity, window or capacity)
    split = _split(rows * (heads // shared), seen)
    splits = -(-seen // split)
    partial, join = _kernels()
    known = constants if constants is not None else {}
    # Not in the template: each split would be compiled when it first comes, a second and a half each.
    limits = (window or 0, split)
    sizes = [("D", dim), ("HQ", heads), ("HKV", kv_heads), ("G", group), ("GQ", shared)]
    new_keys, new_values = (queries, queries) if new is None else map(mx.contiguous, new)
    parts, stats = partial(
        inputs=[
            mx.contiguous(queries),
            keys,
            values,
            slots,
            lengths,
            _known(known, limits, mx.int32),
            _known(known, (scale,), mx.float32),
            new_keys,
            new_values,
        ],
        template=[("T", queries.dtype), *sizes, ("NEW", new is not None)],
        grid=(splits * THREADS, heads // shared, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, heads, splits, dim), (rows, heads, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = join(
        inputs=[parts, stats, sinks if sinks is not None else stats],
        template=[("T", queries.dtype), ("D", dim), ("HQ", heads), ("SINKS", sinks is not None)],
        grid=(dim, heads, rows),
        threadgroup=(dim, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out  # type: ignore[no-any-return]


def _known(constants: dict[Any, mx.array], numbers: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """An array of these numbers, made once."""
    if numbers not in constants:
        constants[numbers] = mx.array(numbers, dtype=dtype)
    return constants[numbers]


def _split(blocks: int, longest: int) -> int:
    """Tokens that one thread block takes: fewer where there are few blocks."""
    for split in (512, 256, 128):
        if blocks * -(-longest // split) >= TARGET_BLOCKS:
            return split
    return 64


@functools.cache
def ragged_available(head_dim: int, group: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel runs here for such heads and agrees with the reference. Tried once per process."""
    if head_dim not in HEAD_DIMS or dtype not in (mx.bfloat16, mx.float16):
        return False
    if not on_cuda():
        return False
    try:
        return all(
            _agrees(head_dim, group, dtype, lengths) for lengths in ((1, 70, 300), (513, 2, 129), (9, 700))
        )
    except Exception:
        return False


def _agrees(head_dim: int, group: int, dtype: mx.Dtype, lengths: tuple[int, ...]) -> bool:
    """With tokens that are in their blocks, and with new ones, which are there afterwards; in rings that have
    wrapped, too, without a window of their own."""
    kv_heads, capacity = 2, 576
    wrapped = max(lengths) > capacity
    shape = (len(lengths) + 1, kv_heads, capacity, head_dim)
    draw = functools.partial(_normal, dtype=dtype)
    keys, values = draw(shape, 1), draw(shape, 2)
    queries = draw((len(lengths), kv_heads * group, 1, head_dim), 3)
    slots = [len(lengths) - row for row in range(len(lengths))]
    sinks = draw((kv_heads * group,), 4)
    tokens = (len(lengths), kv_heads, 1, head_dim)
    news = [(draw(tokens, seed), draw(tokens, seed + 1)) for seed in (5, 7)]
    for window, sink, new in (
        (None, None, None),
        (None, sinks, news[0]),
        (None if wrapped else 50, None, news[1]),
        (None, None, None),
    ):
        want_keys, want_values = mx.contiguous(keys + 0), mx.contiguous(values + 0)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if new is not None:
                want_keys[slot, :, (length - 1) % capacity] = new[0][row, :, 0]
                want_values[slot, :, (length - 1) % capacity] = new[1][row, :, 0]
        mx.eval(keys, values, want_keys, want_values)
        got = ragged_attention(
            queries,
            keys,
            values,
            mx.array(slots, dtype=mx.int32),
            mx.array(lengths, dtype=mx.int32),
            max(lengths),
            scale=head_dim**-0.5,
            window=window,
            sinks=sink,
            new=new,
        )
        mx.eval(got)
        if not bool(((keys == want_keys).all() & (values == want_values).all()).item()):
            return False
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            first = max(0, length - window) if window else 0
            want = mx.fast.scaled_dot_product_attention(
                queries[row : row + 1].astype(mx.float32),
                want_keys[slot : slot + 1, :, first:length].astype(mx.float32),
                want_values[slot : slot + 1, :, first:length].astype(mx.float32),
                scale=head_dim**-0.5,
                sinks=sink.astype(mx.float32) if sink is not None else None,
            )
            error = mx.abs(got[row : row + 1].astype(mx.float32) - want).max()
            if not bool((error < 0.02).item()):
                return False
    return True


def _normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
