"""What a recurrent layer's state is: its shapes, dtypes and kind, and one byte page that holds a row of it.

Modelled on vLLM's `MambaSpec` and abstract Mamba layer. A row's states of one layer, side by side in one
page of bytes, are what is checkpointed, spilled to disk, restored and rolled back; nothing that moves pages
needs to know what the states mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

CACHE_MODES = ("none", "align", "all")

KINDS = {
    "mamba": "mamba1",
    "jamba": "mamba1",
    "mamba2": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "nemotron_h": "mamba2",
    "plamo2": "mamba2",
    "plamo2vl": "mamba2",
    "qwen3_next": "gated_delta",
    "qwen3_5": "gated_delta",
    "olmo_hybrid": "gated_delta",
    "kimi_linear": "gated_delta",
    "kimi_k3": "gated_delta",
    "bailing_moe_v3": "gated_delta",
    "lfm2": "short_conv",
    "lfm2_moe": "short_conv",
    "gear": "short_conv",
    "baichuan_m1": "short_conv",
    "bailing_moe_linear": "linear_attention",
    "bailing_hybrid": "linear_attention",
    "rwkv7": "rwkv",
    "recurrent_gemma": "rg_lru",
}
"""What the recurrent layers of a family are, by the module of mlx-lm or mlx-vlm that their class is in.
Kimi's delta attention gates per channel and is otherwise a gated delta rule."""

WRITES = ("__setitem__", "update_window", "update_recurrent")
"""How models write states: mlx-lm's by the first, mlx-vlm's by the others."""


@dataclass(frozen=True, slots=True)
class MambaStateSpec:
    """One recurrent layer's states.

    Attributes:
        shapes: of each state, without the rows; for a Mamba layer (conv_state, ssm_state).
        dtypes: of each state. Often a convolution keeps the model's dtype and the recurrence float32.
        kind: mamba1, mamba2, gated_delta, short_conv, linear_attention, rwkv, rg_lru, or recurrent where
            the layer is not known.
        block_size: tokens from one block boundary to the next.
        page_size_padded: bytes of a page, where it must be as large as some other layer's.
        cache_mode: which states are kept for reuse by later requests. `none`: none. `align`: the one at
            the last block boundary of what has been computed at once. `all`: the one at every boundary.
        num_speculative_blocks: drafted tokens that may be in flight; each has a page of its own, so that
            the row can go back to the state before it.

    Raises:
        ValueError: shapes and dtypes of different number, none at all, a negative dimension, a padded size
            smaller than the states, an unknown cache mode, a block size below 1, or negative blocks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    kind: str
    block_size: int
    page_size_padded: int | None = None
    cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes: one of each a state")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise ValueError(f"negative dimension in {self.shapes}")
        if self.cache_mode not in CACHE_MODES:
            raise ValueError(f"cache_mode {self.cache_mode!r} is none of {', '.join(CACHE_MODES)}")
        if self.block_size < 1 or self.num_speculative_blocks < 0:
            raise ValueError("block_size is at least 1, num_speculative_blocks at least 0")
        if self.page_size_padded is not None and self.page_size_padded < self.state_bytes:
            raise ValueError(f"page_size_padded {self.page_size_padded} < {self.state_bytes} bytes of states")

    # Sizes

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Bytes of each state of a row."""
        return tuple(
            math.prod(shape) * dtype.size for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of a row."""
        return sum(self.state_sizes)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page: of all states, or the padded size."""
        return self.state_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def pages_per_row(self) -> int:
        """Pages of a running row: its state, and one for each drafted token."""
        return 1 + self.num_speculative_blocks

    @property
    def row_bytes(self) -> int:
        """Bytes to reserve for a running row; its checkpoints come on top (`checkpoint_bytes`)."""
        return self.pages_per_row * self.page_size_bytes

    # Reuse

    @property
    def reusable(self) -> bool:
        """Whether any state outlives its request."""
        return self.cache_mode != "none"

    def checkpoint_boundaries(self, start: int, end: int) -> tuple[int, ...]:
        """Where to checkpoint while the tokens `[start, end)` go through: a number n in `(start, end]`
        stands for the state after n tokens. A state can be kept only where a forward pass ends, so the
        span must be split there.

        `none`: nowhere. `align`: at the last block boundary. `all`: at every one.
        """
        boundaries = range((start // self.block_size + 1) * self.block_size, end + 1, self.block_size)
        if self.cache_mode == "none":
            return ()
        return tuple(boundaries) if self.cache_mode == "all" else tuple(boundaries[-1:])

    def checkpoint_bytes(self, tokens: int) -> int:
        """Bytes of the checkpoints of a row of `tokens` that was computed at once."""
        return len(self.checkpoint_boundaries(0, tokens)) * self.page_size_bytes

    # Pages

    def pack(self, states: Sequence[mx.array]) -> mx.array:
        """uint8 `[rows, page_size_bytes]`: the states `[rows, *shape]` side by side, then zeros.

        Raises:
            ValueError: another number of states, an unwritten one, another shape or dtype, or different
                numbers of rows.
        """
        if len(states) != len(self.shapes):
            raise ValueError(f"{len(states)} states for a spec of {len(self.shapes)}")
        for which, (state, shape, dtype) in enumerate(zip(states, self.shapes, self.dtypes, strict=True)):
            if state is None:
                raise ValueError(f"state {which} is not written")
            if state.ndim == 0 or tuple(state.shape[1:]) != shape or state.dtype != dtype:
                raise ValueError(
                    f"state {which} is {state.dtype} {tuple(state.shape)}, not {dtype} of rows {shape}"
                )
        rows = states[0].shape[0]
        if any(state.shape[0] != rows for state in states):
            raise ValueError(f"states of {[state.shape[0] for state in states]} rows")
        parts = [
            state.reshape(rows, math.prod(shape)).view(mx.uint8)
            for state, shape in zip(states, self.shapes, strict=True)
            if math.prod(shape)
        ]
        parts.append(mx.zeros((rows, self.page_size_bytes - self.state_bytes), dtype=mx.uint8))
        return mx.concatenate(parts, axis=1)

    def unpack(self, page: mx.array) -> tuple[mx.array, ...]:
        """The states `[rows, *shape]` in `page`, each by view of its bytes: no arithmetic.

        Raises:
            ValueError: not uint8 `[rows, page_size_bytes]`.
        """
        if page.ndim != 2 or page.shape[1] != self.page_size_bytes or page.dtype != mx.uint8:
            raise ValueError(
                f"a page is uint8 [rows, {self.page_size_bytes}], not {page.dtype} {tuple(page.shape)}"
            )
        states = []
        start = 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self.state_sizes, strict=True):
            states.append(_viewed(page, start, size, dtype).reshape(page.shape[0], *shape))
            start += size
        return tuple(states)


def _viewed(page: mx.array, start: int, size: int, dtype: mx.Dtype) -> mx.array:
    """Bytes `[start, start + size)` of every row as `dtype`, `[rows, size / dtype.size]`.

    The bytes are gathered first: a view of a slice may share the memory of the page, or of a pool that the
    page is a slice of, at an address that does not suit the dtype, which not every device can read.
    """
    rows = page.shape[0]
    if not (size and rows):
        return mx.zeros((rows, size // dtype.size), dtype=dtype)
    part = mx.take(page[:, start : start + size], mx.arange(rows), axis=0)
    return part.view(dtype)


def states_of(layer_cache: Any) -> list[mx.array | None] | None:
    """The states of a recurrent cache of mlx-lm, mlx-vlm or ours, or of the recurrent one in a list of
    caches; None where there is none. The list is the cache's own."""
    if hasattr(layer_cache, "caches"):
        found = [states for states in map(states_of, layer_cache.caches) if states is not None]
        return found[0] if found else None
    states: Any = getattr(layer_cache, "cache", None)
    return states if isinstance(states, list) else None


def state_spec_for(
    layer_cache: Any,
    *,
    kind: str = "recurrent",
    block_size: int = 64,
    cache_mode: str = "none",
    num_speculative_blocks: int = 0,
) -> MambaStateSpec:
    """The spec of a live recurrent cache, whose states are written. Reads shapes only, no device.

    Raises:
        ValueError: not a recurrent cache, by its type's name; a state not yet written.
    """
    states = states_of(layer_cache)
    if states is None:
        raise ValueError(f"{type(layer_cache).__name__} holds no recurrent states")
    shapes, dtypes = [], []
    for which, state in enumerate(states):
        if state is None:
            raise ValueError(f"state {which} of {type(layer_cache).__name__} is not written")
        shapes.append(tuple(state.shape[1:]))
        dtypes.append(state.dtype)
    return MambaStateSpec(
        tuple(shapes),
        tuple(dtypes),
        kind,
        block_size,
        cache_mode=cache_mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def specs_for(model: Any, **options: Any) -> list[MambaStateSpec]:
    """The spec of every recurrent layer of an mlx-lm or mlx-vlm model, in the order of its caches; none
    for a model of attention only. `options` are `state_spec_for`'s.

    Found by sending two tokens, one by one, through the model on caches of its own and asking which module
    writes which state. Only the graph is built for it: shapes and dtypes are known without computing, so
    no weight is read and the cost is that of tracing two steps. What the model keeps of a call on itself
    (mlx-vlm's `_rope_deltas`) is put back.

    Raises:
        ValueError: a layer whose states grow with the tokens (the token history of longcat_flash_ngram):
            it has no page of a fixed size.
    """
    model = model if hasattr(model, "make_cache") else getattr(model, "language_model", model)
    if not hasattr(model, "make_cache"):
        return []
    caches = model.make_cache()
    layers = list(_recurrent(caches))
    for layer in layers:
        layer.__class__ = _watched(type(layer))
        layer.writers = []
    token = mx.zeros((1, 1), dtype=mx.int32)
    with _unchanged(model):
        model(token, cache=caches)
        specs = [state_spec_for(layer, kind=_kind(layer.writers), **options) for layer in layers]
        model(token, cache=caches)
    for layer, spec in zip(layers, specs, strict=True):
        if state_spec_for(layer, kind=spec.kind, **options) != spec:
            raise ValueError(f"states written by {_names(layer.writers)} grow with the tokens")
    return specs


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    items, attributes = dict(module), dict(vars(module))
    try:
        yield
    finally:
        dict.clear(module)
        dict.update(module, items)
        vars(module).clear()
        vars(module).update(attributes)


def _recurrent(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _recurrent(cache.caches)
        elif states_of(cache) is not None:
            yield cache


def _watched(kind: Any) -> type:
    """A cache class that notes which modules write its states, in `writers`."""

    def noting(name: str) -> Any:
        original = getattr(kind, name)

        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None:
                self.writers.append(type(frame.f_locals["self"]))
            return original(self, *args, **kwargs)

        return write

    return type(kind.__name__, (kind,), {name: noting(name) for name in WRITES if hasattr(kind, name)})


def _kind(writers: Sequence[type]) -> str:
    for writer in writers:
        for part in reversed(writer.__module__.split(".")):
            if part in KINDS:
                return KINDS[part]
    return "recurrent"


def _names(writers: Sequence[type]) -> str:
    return " and ".join(sorted({writer.__name__ for writer in writers})) or "no module"
