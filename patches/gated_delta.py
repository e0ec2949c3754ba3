"""Gated delta layers in one launch on CUDA.

Upstream, mlx-lm 0.32 and mlx-vlm 0.7: the recurrence has a kernel for Metal alone. Elsewhere it is computed
token by token, some ten operations each, so that on CUDA a prompt of a few thousand tokens takes a minute;
mlx-vlm's chunked form covers only prompts with one gate per head. Here one launch takes all tokens: eight
lanes share a row of the state, which stays in their registers, and sums are float32.

The recurrence, per head, with the state S as [values, keys]: S = g S, d = (v - S k) beta, S = S + d k,
y = S q. Source: Yang et al., Gated Delta Networks, 2024.

Used where the default device is a CUDA device and a self-test agrees with the recurrence as it is written; a
CPU is left as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from chairlift.patches.replacement import Replacement

VERSIONS_LM = ">=0.32.2,<0.33"
VERSIONS_VLM = ">=0.7.10,<0.8"

ROWS = 16
"""Rows of a head's state that one thread block of 128 keeps."""
LANES = 8
TILE = 16
"""Tokens whose keys and queries lie in shared memory at a time."""
KEY_DIMS = tuple(range(LANES * 4, 193, LANES * 4))
"""Multiples of what the lanes of a row read at a time, as many as fit in shared memory."""

Recurrence = Callable[..., tuple[mx.array, mx.array]]

_SOURCE = """
    constexpr int N = DK / LANES;                // numbers of a state's row in one lane
    __shared__ float ks[TILE * DK], qs[TILE * DK], gs[VECTOR ? TILE * DK : TILE];
    __shared__ float vs[TILE * ROWS], ys[TILE * ROWS], bs[TILE];
    const int hv = blockIdx.y, hk = hv / (HV / HK), first = blockIdx.x * ROWS;
    const int tokens = q_shape[1];
    const int sub = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const size_t batch = blockIdx.z;
    const size_t own = ((batch * HV + hv) * DV + first + row) * DK;
    float s[N];
    #pragma unroll
    for (int i = 0; i < N; ++i) s[i] = (float)state[own + (i / 4 * LANES + sub) * 4 + i % 4];

    for (int t0 = 0; t0 < tokens; t0 += TILE) {
        const int count = min(TILE, tokens - t0);
        const size_t at = batch * tokens + t0;
        for (int i = threadIdx.x; i < count * DK; i += 128) {
            const size_t from = ((at + i / DK) * HK + hk) * DK + i % DK;
            ks[i] = (float)k[from];
            qs[i] = (float)q[from];
            if (VECTOR) gs[i] = (float)g[((at + i / DK) * HV + hv) * DK + i % DK];
        }
        for (int i = threadIdx.x; i < count * ROWS; i += 128) {
            vs[i] = (float)v[((at + i / ROWS) * HV + hv) * DV + first + i % ROWS];
        }
        if (threadIdx.x < count) {
            bs[threadIdx.x] = (float)beta[(at + threadIdx.x) * HV + hv];
            if (!VECTOR) gs[threadIdx.x] = (float)g[(at + threadIdx.x) * HV + hv];
        }
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            if (MASKED && !mask[at + t]) {
                if (sub == 0) ys[t * ROWS + row] = 0.0f;
                continue;
            }
            float memory = 0.0f;
            #pragma unroll
            for (int i = 0; i < N; ++i) {
                const int d = (i / 4 * LANES + sub) * 4 + i % 4;
                s[i] *= VECTOR ? gs[t * DK + d] : gs[t];
                memory += s[i] * ks[t * DK + d];
            }
            for (int step = LANES / 2; step > 0; step /= 2) {
                memory += __shfl_xor_sync(0xffffffffu, memory, step);
            }
            const float delta = (vs[t * ROWS + row] - memory) * bs[t];
            float out = 0.0f;
            #pragma unroll
            for (int i = 0; i < N; ++i) {
                const int d = (i / 4 * LANES + sub) * 4 + i % 4;
                s[i] += ks[t * DK + d] * delta;
                out += s[i] * qs[t * DK + d];
            }
            for (int step = LANES / 2; step > 0; step /= 2) {
                out += __shfl_xor_sync(0xffffffffu, out, step);
            }
            if (sub == 0) ys[t * ROWS + row] = out;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count * ROWS; i += 128) {
            y[((at + i / ROWS) * HV + hv) * DV + first + i % ROWS] = (T)ys[i];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < N; ++i) {
        state_out[own + (i / 4 * LANES + sub) * 4 + i % 4] = (S)s[i];
    }
"""


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="chairlift_gated_delta",
        input_names=["q", "k", "v", "g", "beta", "state", "mask"],
        output_names=["y", "state_out"],
        source=_SOURCE,
    )


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The recurrence over all tokens, on CUDA.

    Args:
        q, k: `[batch, tokens, key_heads, key_dim]`, normalized and scaled.
        v: `[batch, tokens, value_heads, value_dim]`.
        g: decay, `[batch, tokens, value_heads]`, or with one more axis of `key_dim`.
        beta: `[batch, tokens, value_heads]`.
        state: `[batch, value_heads, value_dim, key_dim]`.
        mask: boolean `[batch, tokens]`; a token without leaves the state as it is and gives zeros.

    Returns:
        `[batch, tokens, value_heads, value_dim]` of q's type, and the state behind the last token.
    """
    batch, _, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    y, after = _kernel()(
        inputs=[q, k, v, g, beta, state, mask if mask is not None else beta],
        template=[
            ("T", q.dtype),
            ("S", state.dtype),
            ("DK", key_dim),
            ("DV", value_dim),
            ("HK", key_heads),
            ("HV", value_heads),
            ("ROWS", ROWS),
            ("LANES", LANES),
            ("TILE", TILE),
            ("VECTOR", g.ndim == 4),
            ("MASKED", mask is not None),
        ],
        grid=(128 * (value_dim // ROWS), value_heads, batch),
        threadgroup=(128, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )
    return y, after


def fits(q: mx.array, k: mx.array, v: mx.array, state: mx.array | None) -> bool:
    """Whether the kernel is written for such shapes and types."""
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    return (
        key_dim in KEY_DIMS
        and value_dim % ROWS == 0
        and v.shape[2] % k.shape[2] == 0
        and q.dtype in (mx.float32, mx.bfloat16, mx.float16)
        and (state is None or state.dtype in (mx.float32, q.dtype))
    )


def _on_cuda(original: Recurrence) -> Recurrence:
    @functools.wraps(original)
    def call(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[mx.array, mx.array]:
        extra = any(value is not None for value in (*args, *kwargs.values()))
        if not extra and fits(q, k, v, state) and kernel_agrees(k.shape[-1], g.ndim == 4, q.dtype):
            if state is None:
                shape = (v.shape[0], v.shape[2], v.shape[3], k.shape[3])
                state = mx.zeros(shape, dtype=mx.float32)
            return gated_delta(q, k, v, g, beta, state, mask)
        return original(q, k, v, g, beta, state, mask, *args, **kwargs)

    return call


@functools.cache
def kernel_agrees(key_dim: int, vector: bool, dtype: mx.Dtype) -> bool:
    """Whether there is a CUDA device on which the kernel gives what the recurrence says. Tried once per
    process."""
    if mx.default_device() == mx.cpu or not mx.cuda.is_available():
        return False
    try:
        return all(_agrees(key_dim, vector, dtype, masked) for masked in (False, True))
    except Exception:
        return False


def _agrees(key_dim: int, vector: bool, dtype: mx.Dtype, masked: bool) -> bool:
    batch, tokens, key_heads, value_heads, value_dim = 2, 21, 1, 2, ROWS
    keys = iter(mx.random.split(mx.random.key(7), 8))
    shape = (batch, tokens, key_heads, key_dim)
    q, k = (mx.random.normal(shape, key=next(keys)) * key_dim**-0.5 for _ in range(2))
    v = mx.random.normal((batch, tokens, value_heads, value_dim), key=next(keys))
    gates = (batch, tokens, value_heads, *((key_dim,) if vector else ()))
    g = mx.random.uniform(0.8, 1.0, gates, key=next(keys))
    beta = mx.random.uniform(shape=(batch, tokens, value_heads), key=next(keys))
    state = mx.random.normal((batch, value_heads, value_dim, key_dim), key=next(keys))
    mask = mx.random.uniform(shape=(batch, tokens), key=next(keys)) > 0.3 if masked else None
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    got = gated_delta(q, k, v, g, beta, state, mask)
    want = reference(q, k, v, g, beta, state, mask)
    bound = 1e-4 if dtype == mx.float32 else 0.03
    return all(
        bool((mx.abs(a.astype(mx.float32) - b).max() < bound).item()) for a, b in zip(got, want, strict=True)
    )


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The recurrence as it is written, in float32; arguments as of `gated_delta`."""
    q, k, v, g, beta, state = (array.astype(mx.float32) for array in (q, k, v, g, beta, state))
    group = v.shape[2] // k.shape[2]
    q, k = mx.repeat(q, group, axis=2), mx.repeat(k, group, axis=2)
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None, :]
        decayed = state * decay
        memory = (decayed * k[:, t, :, None, :]).sum(axis=-1)
        delta = (v[:, t] - memory) * beta[:, t, :, None]
        after = decayed + delta[..., None] * k[:, t, :, None, :]
        out = (after * q[:, t, :, None, :]).sum(axis=-1)
        if mask is not None:
            seen = mask[:, t, None, None]
            out, after = mx.where(seen, out, 0), mx.where(seen[..., None], after, state)
        outputs.append(out)
        state = after
    return mx.stack(outputs, axis=1), state


LM = (Replacement("mlx_lm.models.gated_delta", "", "gated_delta_ops", _on_cuda),)
VLM = (
    Replacement("mlx_vlm.models.gated_delta", "", "gated_delta_ops", _on_cuda),
    Replacement("mlx_vlm.models.qwen3_5.gated_delta", "", "gated_delta_ops", _on_cuda),
    Replacement("mlx_vlm.models.qwen3_5.gated_delta", "", "gated_delta_chunked", _on_cuda),
)
