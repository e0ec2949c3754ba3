"""Drawing one token for every row of a batch at once.

Settings are per-row arrays, so a row's draw depends on its own logits, settings, seed and count alone. Keys
are counter-based: token n of a row is drawn with a key made of the row's seed and n, so the same tokens come
alone, in any batch, and after preemption. The draw is Gumbel-max, which equals `mx.random.categorical`.

Filters, in the order that vLLM and mlx-lm apply them after temperature: top_k, top_p, min_p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from chairlift.engine.request import SamplingParams

_WORD = 2**32
_COLDEST = 1e-7
"""Temperatures below count as this, under which logits that differ at all are drawn greedily: smaller ones
take logits out of float32."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row draws its next token. `count`: tokens that it has drawn before."""

    sampling: SamplingParams
    key: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step draws, on the device.

    Attributes:
        tokens: int32 `[rows]`.
        valid: bool `[rows]`; False where the row's logits are no distribution: NaN, +inf, or all -inf.
        logprobs: float32 `[rows]` of the drawn tokens, or None if no row asked.
        top_tokens, top_logprobs: `[rows, n]`, most probable first, for the largest n asked for.
    """

    tokens: mx.array
    valid: mx.array
    logprobs: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        parts = (self.tokens, self.valid, self.logprobs, self.top_tokens, self.top_logprobs)
        return [part for part in parts if part is not None]


def row_key(seed: int) -> tuple[int, int]:
    """Two well-mixed 32-bit words for a seed, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def sample(logits: mx.array, draws: Sequence[Draw]) -> Drawn:
    """Draw one token per row.

    Args:
        logits: `[rows, vocab]`, any float type.
        draws: one per row, in order.
    """
    logits = logits.astype(mx.float32)
    settings = [draw.sampling for draw in draws]
    greedy = mx.argmax(logits, axis=-1)
    tokens = greedy
    if not all(params.greedy for params in settings):
        drawn = _draw(_filtered(logits, settings), _noise_keys(draws))
        warm = mx.array([not params.greedy for params in settings])
        tokens = mx.where(warm, drawn, greedy)
    tokens = tokens.astype(mx.int32)
    valid = mx.isfinite(logits.max(axis=-1)) & mx.logical_not(mx.isnan(logits.sum(axis=-1)))
    return Drawn(tokens, valid, *_logprobs(logits, tokens, settings))


def _noise_keys(draws: Sequence[Draw]) -> mx.array:
    """uint32 `[rows, 2]`."""
    words = [(first, (second + draw.count) % _WORD) for draw in draws for first, second in [draw.key]]
    return mx.array(words, dtype=mx.uint32)


def _draw(logits: mx.array, keys: mx.array) -> mx.array:
    noise = mx.vmap(lambda key, row: mx.random.gumbel(row.shape, mx.float32, key=key))(keys, logits)
    return mx.argmax(logits + noise, axis=-1)


def _filtered(logits: mx.array, settings: Sequence[SamplingParams]) -> mx.array:
    """Logits over temperature, -inf where a filter drops the token. Rows without a filter pass unchanged."""
    heat = mx.array([max(params.temperature or 1.0, _COLDEST) for params in settings], dtype=mx.float32)
    logits = logits / heat[:, None]
    vocab = logits.shape[-1]
    if any(0 < params.top_k < vocab for params in settings):
        top_k = [params.top_k if 0 < params.top_k < vocab else vocab for params in settings]
        keep = _heaviest(_ordered(logits), None, mx.array(top_k, dtype=mx.float32)[:, None])
        logits = mx.where(keep, logits, -mx.inf)
    if any(params.top_p < 1 for params in settings):
        # Row sums of probabilities stray from 1 by rounding, so rows without the filter are left out of it.
        top_p = mx.array([params.top_p for params in settings], dtype=mx.float32)[:, None]
        whole = mx.array([params.top_p >= 1 for params in settings])[:, None]
        probs = mx.softmax(logits, axis=-1, precise=True)
        # Never no mass at all, which a top_p too small for float32 would ask for.
        keep = _heaviest(_ordered(probs), probs, mx.maximum(top_p, 1e-30)) | whole
        logits = mx.where(keep, logits, -mx.inf)
    if any(params.min_p > 0 for params in settings):
        # log(min_p), or -inf for rows without: p < min_p * p_max  <=>  logit < logit_max + log(min_p)
        share = mx.log(mx.array([params.min_p for params in settings], dtype=mx.float32))[:, None]
        logits = mx.where(logits < logits.max(axis=-1, keepdims=True) + share, -mx.inf, logits)
    return logits


def _ordered(values: mx.array) -> mx.array:
    """int32 that compare as the float32 `values` do."""
    bits = values.view(mx.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _heaviest(order: mx.array, weights: mx.array | None, target: mx.array) -> mx.array:
    """Boolean `[rows, vocab]`: the fewest entries, largest first, whose weights reach `target` `[rows, 1]`.

    Entries equal to the smallest one kept are kept too; entries count 1 where `weights` is None. Finds the
    threshold by bisection over the 32 bits of `order`: several times faster than sorting a vocabulary.
    """
    low = mx.full(target.shape, -(2**31), dtype=mx.int32)
    high = mx.full(target.shape, 2**31 - 1, dtype=mx.int32)
    one, zero = mx.array(1.0), mx.array(0.0)
    for _ in range(32):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = mx.where(order >= middle, one if weights is None else weights, zero)
        enough = reached.sum(axis=-1, keepdims=True) >= target
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return order >= low


def _logprobs(
    logits: mx.array, tokens: mx.array, settings: Sequence[SamplingParams]
) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
    """(of the drawn tokens, top tokens, their logprobs), under the model's own distribution."""
    wanted = max((params.logprobs for params in settings if params.logprobs is not None), default=None)
    if wanted is None:
        return None, None, None
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm
    if wanted == 0:
        return drawn[:, 0], None, None
    wanted = min(wanted, logits.shape[-1])
    top = mx.argpartition(-logits, kth=wanted - 1, axis=-1)[:, :wanted]
    values = mx.take_along_axis(logits, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    top = mx.take_along_axis(top, order, axis=-1)
    return drawn[:, 0], top, mx.take_along_axis(values, order, axis=-1) - norm
