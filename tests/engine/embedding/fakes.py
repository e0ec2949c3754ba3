"""An encoder and a tokenizer without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from chairlift.engine.embedding.types import (
    BatchCost,
    EmbeddingModelInfo,
    LoadedEmbedder,
    Task,
    TokenizedText,
    Vectors,
)
from tests.gate import Gate

WIDTH = 4
POISON = 255
"""A batch with this token in it raises."""
NOT_A_NUMBER = 254
"""A text with this token has a vector of NaN."""


def vector(text: TokenizedText) -> list[float]:
    """A pure function of the text, so that nobody gets another's."""
    places = range(1, 1 + len(text))
    tokens = [token + 1000 * kind for token, kind in zip(text.token_ids, types(text), strict=True)]
    weighted = [place * token for place, token in zip(places, tokens, strict=True)]
    numbers = [float(sum(tokens)), float(len(text)), float(sum(weighted)), float(tokens[0])]
    return [float("nan")] * WIDTH if NOT_A_NUMBER in text.token_ids else numbers


def types(text: TokenizedText) -> tuple[int, ...]:
    return text.type_ids or (0,) * len(text)


def score(text: TokenizedText) -> list[float]:
    """Of a pair: how much longer the second is than the first, in tokens."""
    second = sum(types(text))
    return [float(second - (len(text) - second))]


class FakeEncoder:
    """Args: of: the vector of a text."""

    def __init__(self, of: Callable[[TokenizedText], list[float]] = vector) -> None:
        self._of = of
        self.batches: list[list[TokenizedText]] = []
        self.threads: set[str] = set()
        self.gate = Gate()
        self.closed = 0

    def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        self.gate.go()
        self.threads.add(threading.current_thread().name)
        self.batches.append(list(texts))
        if any(POISON in text.token_ids for text in texts):
            raise RuntimeError("poisoned")
        return np.array([self._of(text) for text in texts], np.float32)

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed += 1


class FakePairTokenizer:
    """Bytes, with 1 before each text and 2 at the end."""

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> TokenizedText:
        parts = [text.encode()] + ([] if pair is None else [pair.encode()])
        if limit is not None:
            special = (len(parts) + 1) * add_special_tokens
            over = sum(map(len, parts)) + special - limit
            parts[-1] = parts[-1][: len(parts[-1]) - max(0, over)]
        tokens: list[int] = []
        kinds: list[int] = []
        for kind, part in enumerate(parts):
            marked = [1, *part] if add_special_tokens else [*part]
            if add_special_tokens and kind == len(parts) - 1:
                marked.append(2)
            tokens += marked
            kinds += [kind] * len(marked)
        return TokenizedText(tuple(tokens), tuple(kinds) if pair is not None else ())


def fake_embedder(
    encoder: FakeEncoder | None = None,
    *,
    name: str = "embedder",
    task: Task = Task.EMBED,
    context_length: int = 64,
    batch_tokens: int = 64,
    padding: bool = True,
    weight_bytes: int = 0,
    batch_cost: BatchCost | None = None,
) -> Callable[[], LoadedEmbedder]:
    """A factory as `EmbeddingEngine` takes it."""
    loaded = LoadedEmbedder(
        EmbeddingModelInfo(
            name=name,
            context_length=context_length,
            dimensions=WIDTH if task is Task.EMBED else 1,
            vocab_size=256,
            created=1_700_000_000,
            task=task,
            architecture="fake",
            pooling="mean",
            padding=padding,
            batch_tokens=batch_tokens,
            weight_bytes=weight_bytes,
            batch_cost=batch_cost,
        ),
        FakePairTokenizer(),
        encoder or FakeEncoder(vector if task is Task.EMBED else score),
    )
    return lambda: loaded
