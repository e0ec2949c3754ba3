"""The words between the embedding engine, which batches, and the encoder, which computes.

Host values only: they may cross threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chairlift.engine.memory.vocabulary import Device

Vectors = npt.NDArray[np.float32]
"""`[texts, width]` in host memory, one row a text, in the texts' order."""


class Task(StrEnum):
    """What a model is for."""

    EMBED = "embed"
    """A vector for a text."""
    SCORE = "score"
    """A number for a pair of texts: a cross-encoder."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text, or a pair of texts, as the model reads it: special tokens are among the tokens."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    """0 for tokens of the first text and 1 for those of the second; empty means all 0."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Bytes that a text takes while it is computed: attention may look at every pair of its tokens."""

    token: float
    pair: float = 0.0

    def of(self, tokens: int) -> float:
        return self.token * tokens + self.pair * tokens * tokens

    @classmethod
    def measured(cls, shorter: tuple[int, int], longer: tuple[int, int]) -> BatchCost:
        """Through what two texts took, (tokens, bytes) each; never less than either of them."""
        (few, less), (many, more) = shorter, longer
        pair = (more / many - less / few) / (many - few) if many > few else 0.0
        if pair <= 0:
            return cls(max(less / few, more / many))
        token = less / few - pair * few
        # What grows faster than with the square is no batch's; all of it is counted to the pairs then.
        return cls(token, pair) if token >= 0 else cls(0.0, max(less / few**2, more / many**2))


@dataclass(frozen=True, slots=True)
class EmbeddingModelInfo:
    """What is served."""

    name: str
    """As clients spell it in `model`."""
    context_length: int
    """Most tokens of a text, special tokens included."""
    dimensions: int
    """Width of a vector; 1 for a cross-encoder."""
    vocab_size: int
    """Tokens that the model has."""
    created: int
    """Unix seconds."""
    task: Task = Task.EMBED
    architecture: str = ""
    """`model_type` of the configuration."""
    pooling: str = ""
    """How one vector is made of a text's tokens."""
    padding: bool = True
    """Texts of different lengths share a batch; false where the model's answer would depend on it."""
    batch_tokens: int = 1024
    """Most tokens of a batch that suit the device, padding included."""
    device: str = ""
    dtype: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    batch_cost: BatchCost | None = None
    """None: not known."""


class Encoder(Protocol):
    """Computes batches. Every method is called on the one MLX thread, and blocks."""

    def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Vectors as the model pools them, not normalised; of a cross-encoder, scores `[texts, 1]`."""
        ...

    def close(self) -> None:
        """Drop the model; nothing else will compute on this thread."""
        ...


class EmbeddingTokenizer(Protocol):
    """Safe to call from any thread."""

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> TokenizedText:
        """Tokens of a text, or of a text and its pair.

        Args:
            limit: keep so many tokens at most, special tokens included: the end of the text is cut off, in a
                pair that of the second. Special tokens and the first text of a pair are never cut.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedEmbedder:
    """A model ready to encode: what the embedding engine's factory returns, on the MLX thread."""

    info: EmbeddingModelInfo
    tokenizer: EmbeddingTokenizer
    encoder: Encoder
    device: Device | None = None
    """None: its memory is not bounded."""
