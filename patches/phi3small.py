"""Phi-3 small's block-sparse layers mask by each token's true position.

Upstream, mlx-lm 0.32: the boolean mask of a prompt is added to the scores (1 for what may be seen), so
tokens see later ones of their block; and blocks are aligned with the end of the keys, so an answer depends
on where its prompt's chunks end and a decode step does not agree with a prefill of the same tokens. Here a
query sees the keys up to its own, of its own block and `num_local_blocks - 1` before it and of every
`vert_stride`-th block.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.patches.parts import calling_by_parts
from chairlift.patches.replacement import Replacement

VERSIONS = ">=0.32.2,<0.33"


def visible(layer: Any, positions: mx.array, keys: int) -> mx.array:
    """Boolean `[rows, heads, tokens, keys]` for queries at `positions` `[rows, tokens]`; key k is token k."""
    key = mx.arange(keys)
    key_block = key // layer.blocksparse_block_size
    query_block = positions[:, None, :, None] // layer.blocksparse_block_size
    heads = mx.arange(1, layer.n_heads + 1)[:, None]
    strided = ((key_block + heads) % layer.blocksparse_vert_stride == 0)[None, :, None]
    near = query_block - key_block < layer.blocksparse_num_local_blocks
    seen: mx.array = (key <= positions[:, None, :, None]) & (near | strided)
    return seen


def block_sparse(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
    """Attention of one block-sparse layer over `x` `[rows, tokens, hidden]`. `mask` says nothing that the
    positions do not."""
    rows, tokens, _ = x.shape
    qkv = layer.query_key_value(x).reshape(rows, tokens, -1, layer.n_q_per_kv + 2, layer.head_dim)
    queries = qkv[..., :-2, :].flatten(-3, -2).transpose(0, 2, 1, 3)
    keys = qkv[..., -2, :].transpose(0, 2, 1, 3)
    values = qkv[..., -1, :].transpose(0, 2, 1, 3)
    offset = cache.offset if cache is not None else 0
    positions = mx.array(offset, dtype=mx.int32).reshape(-1, 1) + mx.arange(tokens)
    queries, keys = layer.rope(queries, offset=offset), layer.rope(keys, offset=offset)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    output = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=layer.scale, mask=visible(layer, positions, keys.shape[2])
    )
    return layer.dense(output.transpose(0, 2, 1, 3).reshape(rows, tokens, -1))


def _attention(original: Any) -> Any:
    sparse = calling_by_parts(block_sparse)

    @functools.wraps(original)
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return (sparse if self.block_sparse else original)(self, x, mask, cache)

    return call


BLOCKS = (Replacement("mlx_lm.models.phi3small", "Attention", "__call__", _attention),)
