"""Finding out how a model's rows may share a step, by trying it on the model itself.

From the fastest way to the slowest (flat, hybrid, dense, rows, solo), the first whose logits equal those of
solo runs is taken. So a family that nobody looked at is served right, if not fast. The trial takes a few
forwards over prompts of a dozen tokens. `docs/models.md` holds the outcome for every family that mlx-lm
knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from chairlift.cache.batch import RowBatch
from chairlift.cache.device import on_cuda
from chairlift.cache.prompt_view import prompt_views
from chairlift.cache.quantized import UnsupportedQuantization
from chairlift.cache.separate import SeparateRows
from chairlift.cache.views import SpanStep
from chairlift.engine.batching import FLAT_STEPS, Batching, make_batch

log = logging.getLogger(__name__)

Body = Callable[..., mx.array]
"""(tokens, cache=caches) -> hidden states, as mlx-lm's models take them."""
Head = Callable[[mx.array], mx.array]

_LENGTHS = (1, 40, 5)
_STEPS = 3
TOLERANCE = {mx.float32: 1e-4, mx.float16: 3e-2, mx.bfloat16: 1e-1}
"""Largest difference of logits that rounding explains, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How a model is batched, and why no faster way was taken."""

    batching: Batching
    reasons: tuple[tuple[Batching, str], ...] = ()
    whole_prompts: bool = False
    """The model answers differently when its prompt comes in chunks, so it is given in one."""


def find_batching(model: nn.Module, vocab_size: int) -> Finding:
    """Try the ways from fastest to slowest. Runs on the MLX thread.

    Args:
        model: called as mlx-lm's models are: `model(tokens, cache=caches)` -> logits.
        vocab_size: token ids below this are valid.
    """
    trial = Trial(model, vocab_size, lambda: make_prompt_cache(model))
    whole = not trial.chunks_agree()
    if whole:
        return Finding(
            Batching.SOLO, ((Batching.FLAT, "Its prompts must be prefilled in one piece."),), whole
        )
    reasons: list[tuple[Batching, str]] = []
    for batching in (Batching.FLAT, Batching.HYBRID, Batching.DENSE, Batching.ROWS):
        reason = trial.objection(batching)
        if reason is None:
            return Finding(batching, tuple(reasons))
        log.info("batching %s does not suit this model: %s", batching, reason)
        reasons.append((batching, reason))
    return Finding(Batching.SOLO, tuple(reasons))


def views_agree(model: nn.Module, vocab_size: int) -> bool:
    """Whether prompts may pass over `prompt_views`, which only pays on CUDA: two chunks over views give the
    logits of two over the caches themselves."""
    return on_cuda() and _views_agree(model, vocab_size)


def _views_agree(model: nn.Module, vocab_size: int) -> bool:
    prompt = some_tokens(0, 40, vocab_size)[None]
    logits = []
    for wrap in (list, prompt_views):
        caches = make_prompt_cache(model)
        try:
            mx.eval(model(prompt[:, :24], cache=wrap(caches)))
            logits.append(model(prompt[:, 24:], cache=wrap(caches))[0, -1])
            mx.eval(logits)
        except Exception as error:
            log.info("this model's prompts pass over its own caches: %s", error)
            return False
    return distance(logits[1], logits[0]) <= TOLERANCE.get(logits[0].dtype, 1e-1)


def split_head(model: nn.Module, vocab_size: int) -> tuple[Body, Head] | None:
    """(body, head) of a model built as mlx-lm's mostly are, if together they equal the model; else None."""
    body = getattr(model, "model", None)
    if not callable(body):
        return None
    head = getattr(model, "lm_head", None)
    if head is None:
        head = getattr(getattr(body, "embed_tokens", None), "as_linear", None)
    if not callable(head):
        return None
    tokens = some_tokens(0, 7, vocab_size)[None]
    try:
        caches, own = make_prompt_cache(model), make_prompt_cache(model)
        equal = True
        for part in (tokens, tokens[:, :2]):  # the second call tells whether the first stored its keys
            whole = model(part, cache=caches)
            parts = head(body(part, cache=own))
            equal = equal and whole.shape == parts.shape
            equal = equal and bool(mx.array_equal(whole, parts, equal_nan=True).item())
    except Exception as error:
        log.debug("the model's head stays with its body: %s", error)
        return None
    return (body, head) if equal else None


class Trial:
    """Solo runs of a few short prompts, and the same rows in a batch.

    Args:
        make_cache: fresh caches for one request.
        tolerance: largest difference of logits, as a share of the largest; None: what rounding explains.
    """

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        make_cache: Callable[[], list[Any]],
        tolerance: float | None = None,
    ) -> None:
        self._model = model
        self._make_cache = make_cache
        self._prompts = [some_tokens(seed, length, vocab_size) for seed, length in enumerate(_LENGTHS)]
        self._answers = [some_tokens(10 + seed, _STEPS, vocab_size) for seed in range(len(_LENGTHS))]
        self._solo = [self._run_solo(*pair) for pair in zip(self._prompts, self._answers, strict=True)]
        mx.eval(self._solo)
        rounding = TOLERANCE.get(self._solo[0].dtype, 1e-1)
        self._tolerance = rounding if tolerance is None else tolerance

    def objection(self, batching: Batching) -> str | None:
        """Why the model cannot be batched this way, or None.

        Raises:
            UnsupportedQuantization: its attention does not take quantized caches.
        """
        template = self._make_cache()
        try:
            if batching is Batching.FLAT and make_batch(batching, template).has_recurrent:
                return "Recurrent layers need the sequence axis."
            logits = self._run(batching, template)
            mx.eval(logits)
        except UnsupportedQuantization:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        worst = max(distance(rows, solo) for rows, solo in zip(logits, self._solo, strict=True))
        if worst <= self._tolerance:
            return None
        return f"Logits differ from solo runs by {worst:.1e} of the largest."

    def chunks_agree(self) -> bool:
        """Whether a prompt prefilled in two chunks gives the logits of one."""
        index = max(range(len(self._prompts)), key=lambda row: len(self._prompts[row]))
        prompt, caches = self._prompts[index], self._make_cache()
        half = len(prompt) // 2
        try:
            mx.eval(self._model(prompt[None, :half], cache=caches))
            logits = self._model(prompt[None, half:], cache=caches)[0, -1]
            mx.eval(logits)
        except Exception as error:
            log.info("this model takes no prompt in chunks: %s", error)
            return False
        return distance(logits, self._solo[index][0]) <= self._tolerance

    def _run_solo(self, prompt: mx.array, answer: mx.array) -> mx.array:
        """Logits `[_STEPS + 1, vocab]`: after the prompt, and after each token of a fixed answer."""
        caches = self._make_cache()
        logits = [self._model(prompt[None], cache=caches)[0, -1]]
        logits += [self._model(token.reshape(1, 1), cache=caches)[0, -1] for token in answer]
        return mx.stack(logits)

    def _run(self, batching: Batching, template: list[Any]) -> list[mx.array]:
        """The same, all rows at once; the last row joins a step later than the others."""
        batch = make_batch(batching, template)
        caches = [self._make_cache() for _ in self._prompts]
        logits: list[list[mx.array]] = [[] for _ in self._prompts]
        done = [0] * len(self._prompts)
        waiting = list(range(len(self._prompts)))
        for step in range(_STEPS + 1):
            entering = [row for row in waiting if row < len(self._prompts) - 1 or step == 1]
            waiting = [row for row in waiting if row not in entering]
            if batching in FLAT_STEPS:
                self._flat(batch, caches, entering, logits, done)
            else:
                for row in entering:
                    logits[row].append(self._model(self._prompts[row][None], cache=caches[row])[0, -1])
                self._decode(batch, logits, done)
            batch.change(join={row: (caches[row], len(self._prompts[row])) for row in entering})
        self._decode(batch, logits, done)
        return [mx.stack(row) for row in logits]

    def _decode(self, batch: RowBatch | SeparateRows, logits: list[list[mx.array]], done: list[int]) -> None:
        batch.change(leave=[row for row in batch.order if done[row] == _STEPS])
        if not batch.order:
            return
        step = batch.begin()
        inputs = self._feed(batch.order, done)
        out = self._model(inputs, cache=batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32)))
        batch.end()
        for index, row in enumerate(batch.order):
            logits[row].append(out[index, -1])

    def _flat(
        self,
        batch: RowBatch | SeparateRows,
        caches: list[list[Any]],
        entering: Sequence[int],
        logits: list[list[mx.array]],
        done: list[int],
    ) -> None:
        batch.change(leave=[row for row in batch.order if done[row] == _STEPS])
        step = batch.begin() if batch.order else None
        inputs = [self._feed(batch.order, done)] if step is not None else []
        positions = list(step.lengths) if step is not None else []
        start, spans = len(batch.order), []
        for row in entering:
            prompt = self._prompts[row]
            inputs.append(prompt[:, None])
            positions += range(len(prompt))
            spans.append((SpanStep(start, start + len(prompt), 0), caches[row]))
            start += len(prompt)
        offset = mx.array(positions, dtype=mx.int32)
        out = self._model(mx.concatenate(inputs), cache=batch.caches(step, offset, spans))
        if step is not None:
            batch.end()
        for index, row in enumerate(batch.order):
            logits[row].append(out[index, -1])
        for (span, _), row in zip(spans, entering, strict=True):
            logits[row].append(out[span.stop - 1, -1])

    def _feed(self, rows: Sequence[int], done: list[int]) -> mx.array:
        tokens = []
        for row in rows:
            tokens.append(self._answers[row][done[row]])
            done[row] += 1
        return mx.stack(tokens)[:, None]


def distance(logits: mx.array, solo: mx.array) -> float:
    """Largest difference as a share of the largest logit; NaN is infinitely far, a token silenced in both
    is equal."""
    apart = mx.where(logits == solo, 0.0, mx.abs(logits - solo)).max()
    share = apart / mx.maximum(mx.where(mx.isinf(solo), 0.0, mx.abs(solo)).max(), 1e-6)
    furthest = float(cast(float, share.item()))
    return furthest if furthest == furthest else float("inf")


def some_tokens(seed: int, length: int, vocab_size: int) -> mx.array:
    """Fixed token ids, spread over the vocabulary, its first ids (often special tokens) left out."""
    low = min(16, vocab_size // 4)
    ids = [low + (7919 * (seed + 1) + 104729 * place) % (vocab_size - low) for place in range(length)]
    return mx.array(ids, dtype=mx.int32)
