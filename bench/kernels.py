"""Our CUDA kernels against what MLX computes in their place: `python bench/kernels.py`.

Needs a CUDA device, mlx, mlx-lm and this tree on the path. Checks that each agrees with its reference, then
times: prompt chunks in one launch and one by one, and the gated delta recurrence in one launch and by
upstream's operations. `--all-heads` checks the heads of more models; compiling takes seconds for each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from chairlift.cache.prefill import attend_span
from chairlift.cache.span_kernel import Chunk, attend_chunks, chunk_of, span_kernel_available
from chairlift.cache.views import span_mask
from chairlift.patches import depthwise_conv, gated_delta
from chairlift.patches.registry import MLX_LM, PATCHES, undo_all

HEADS = (
    (128, 16, 8),
    (128, 32, 8),
    (64, 14, 2),
    (64, 32, 8),
    (256, 16, 2),
    (96, 32, 32),
    (128, 28, 4),
    (192, 8, 8),
)
"""Head size, query heads and KV heads of Qwen3-0.6B, Llama-8B, Qwen2.5-0.5B, Qwen3.5 and others."""
CHUNKS = (
    ("8 x 128 new", [(128, 0)] * 8),
    ("8 x 32 on 1,000", [(32, 1000)] * 8),
    ("1 x 1,024 new", [(1024, 0)]),
    ("1 x 1,024 on 31,744", [(1024, 31744)]),
    ("1 x 2,048 on 6,144", [(2048, 6144)]),
    ("16 of 5 to 200", [(5 + 13 * i, 17 * i) for i in range(16)]),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28, help="launches a measurement, as a model's layers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--all-heads", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    print("| heads | bfloat16 | float16 |\n| --- | --- | --- |")
    for dim, heads, kv_heads in HEADS if arguments.all_heads else HEADS[:2]:
        seen = [span_kernel_available(dim, heads, kv_heads, dtype) for dtype in (mx.bfloat16, mx.float16)]
        print(f"| {heads} of {dim} over {kv_heads} | {seen[0]} | {seen[1]} |", flush=True)
    for key_dim in (64, 128, 192) if arguments.all_heads else (128,):
        for vector in (False, True):
            agrees = [gated_delta.kernel_agrees(key_dim, vector, t) for t in (mx.float32, mx.bfloat16)]
            print(f"gated delta {key_dim} {'vector' if vector else 'scalar'}: {agrees}", flush=True)
    print(f"depthwise convolution: {depthwise_agrees()}", flush=True)
    print("\n| chunks | heads | one launch ms | one by one ms | ratio |\n| --- | --- | ---: | ---: | ---: |")
    for dim, heads, kv_heads in HEADS[:2]:
        for name, spans in CHUNKS:
            time_chunks(name, spans, (dim, heads, kv_heads), arguments.layers, arguments.rounds)
    print("\n| gated delta, 32 heads of 128 | one launch ms | operations ms |\n| --- | ---: | ---: |")
    undo_all([patch for patch in PATCHES if patch.upstream == MLX_LM])
    for batch, tokens in ((32, 1), (1, 64), (1, 512), (1, 2048)):
        time_recurrence(batch, tokens, arguments.rounds)


def depthwise_agrees() -> bool:
    x, weight = normal((2, 70, 64)), normal((64, 4, 1))
    want = mx.conv1d(x.astype(mx.float32), weight.astype(mx.float32), groups=64)
    return bool((mx.abs(depthwise_conv.depthwise(x, weight).astype(mx.float32) - want).max() < 0.1).item())


def time_chunks(
    name: str, spans: list[tuple[int, int]], shape: tuple[int, int, int], layers: int, rounds: int
) -> None:
    dim, heads, kv_heads = shape
    chunks, start = list[Chunk](), 0
    arrays = []
    for tokens, offset in spans:
        capacity = -(-(offset + tokens) // 256) * 256
        chunks.append(chunk_of(start, tokens, offset, offset + tokens, capacity, None, ring=False))
        arrays.append(tuple(normal((1, kv_heads, capacity, dim)) for _ in range(2)))
        start += tokens
    queries = normal((start, heads, 1, dim))
    scale = dim**-0.5

    def together() -> mx.array:
        known: dict[object, object] = {}
        total = mx.array(0.0)
        for _ in range(layers):
            total = total + attend_chunks(queries, chunks, arrays, scale=scale, known=known)[-1, 0, 0, 0]
        return total

    def apart() -> mx.array:
        known: list[dict[object, object]] = [{} for _ in chunks]
        total = mx.array(0.0)
        for _ in range(layers):
            for chunk, (keys, values), masks in zip(chunks, arrays, known, strict=True):
                own = queries[chunk.start : chunk.start + chunk.tokens, :, 0].swapaxes(0, 1)[None]
                shown = keys[:, :, : chunk.held], values[:, :, : chunk.held]
                mask = span_mask(chunk.tokens, chunk.offset, chunk.held, None, None)
                out = attend_span(own, *shown, scale=scale, mask=mask, known=masks, buffers=(keys, values))
                total = total + out[0, 0, -1, 0]
        return total

    fast, slow = timed(together, rounds), timed(apart, max(2, rounds // 3))
    print(
        f"| {name} | {heads} of {dim} | {fast / layers:.3f} | {slow / layers:.3f} | {slow / fast:.1f} |",
        flush=True,
    )


def time_recurrence(batch: int, tokens: int, rounds: int) -> None:
    q, k = (normal((batch, tokens, 16, 128)) * 0.09 for _ in range(2))
    v = normal((batch, tokens, 32, 128))
    g = mx.random.uniform(0.9, 1.0, (batch, tokens, 32))
    beta = mx.random.uniform(shape=(batch, tokens, 32)).astype(mx.bfloat16)
    state = mx.zeros((batch, 32, 128, 128))
    from mlx_lm.models.gated_delta import gated_delta_ops

    def by(recurrence: Callable[..., tuple[mx.array, mx.array]], times: int) -> Callable[[], mx.array]:
        def run() -> mx.array:
            at = state
            for _ in range(times):
                y, at = recurrence(q, k, v, g, beta, at)
            return y.astype(mx.float32).sum() + at.sum()

        return run

    fast = timed(by(gated_delta.gated_delta, 20), rounds) / 20
    slow = timed(by(gated_delta_ops, 1), 2) if tokens <= 512 else None
    print(f"| {batch} x {tokens} | {fast:.3f} | {'–' if slow is None else f'{slow:.2f}'} |", flush=True)


def normal(shape: tuple[int, ...]) -> mx.array:
    array = mx.random.normal(shape).astype(mx.bfloat16)
    mx.eval(array)
    return array


def timed(run: Callable[[], mx.array], rounds: int) -> float:
    """Milliseconds of one call, the median of `rounds`, after one to warm up."""
    mx.eval(run())
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
