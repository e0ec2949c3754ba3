"""Real weights: all-MiniLM-L6-v2, against BERT in float64."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx_embeddings")

import mlx.core as mx

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.loader import load_embedder
from chairlift.engine.embedding.types import LoadedEmbedder, Task, Vectors
from chairlift.engine.embedding.vectors import normalised, similarities
from chairlift.engine.thread import NAME
from tests.engine.embedding.minilm import minilm
from tests.engine.embedding.reference import hidden_states, unit

TEXTS = (
    "The cat sits outside.",
    "A man is playing guitar.",
    "Ein Sessellift hält nie an: man steigt ein und aus, während er fährt.",
    "Naïve café, 中文, \U0001f600!",
    "word",
    "The quick brown fox jumps over the lazy dog. " * 5,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return minilm()


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedEmbedder]:
    """Loaded and used on one thread, as the engine does."""
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(load_embedder, folder, "minilm").result()

        class OnThread:
            def encode(self, texts: object) -> Vectors:
                return thread.submit(loaded.encoder.encode, texts).result()  # type: ignore[arg-type]

            def close(self) -> None: ...

        yield LoadedEmbedder(loaded.info, loaded.tokenizer, OnThread())
        thread.submit(loaded.encoder.close).result()


def test_what_is_loaded(model: LoadedEmbedder) -> None:
    info = model.info
    assert (info.dimensions, info.context_length, info.vocab_size) == (384, 256, 30522)
    assert (info.task, info.architecture, info.pooling, info.dtype) == (Task.EMBED, "bert", "mean", "float32")
    assert info.padding


def test_tokens(model: LoadedEmbedder) -> None:
    encode = model.tokenizer.encode
    # [CLS] and [SEP] around word pieces, by the vocabulary's line numbers; neither padded nor cut to 128.
    assert encode("The cat sits outside.").token_ids == (101, 1996, 4937, 7719, 2648, 1012, 102)
    assert encode("cat", add_special_tokens=False).token_ids == (4937,)
    assert len(encode("word " * 200)) == 202
    pair = encode("cat", "the cat")
    assert pair.token_ids == (101, 4937, 102, 1996, 4937, 102)
    assert pair.type_ids == (0, 0, 0, 1, 1, 1)
    assert encode("the cat sits", limit=4).token_ids == (101, 1996, 4937, 102)
    assert encode("the cat sits", limit=5).token_ids == (101, 1996, 4937, 7719, 102)
    cut = encode("cat", "the cat sits", limit=6)
    assert (cut.token_ids, cut.type_ids) == ((101, 4937, 102, 1996, 4937, 102), (0, 0, 0, 1, 1, 1))


def test_vectors_equal_a_float64_reference(model: LoadedEmbedder, folder: Path) -> None:
    weights = {
        name: np.array(array, np.float64)
        for name, array in mx.load(str(folder / "model.safetensors")).items()
    }
    config = json.loads((folder / "config.json").read_text())
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    vectors = normalised(model.encoder.encode(tokens))
    for text, vector in zip(tokens, vectors, strict=True):
        wanted = unit(hidden_states(weights, config, text.token_ids).mean(axis=0))
        assert np.abs(vector - wanted).max() < 1e-5


def test_a_padded_batch_equals_solo_runs(model: LoadedEmbedder) -> None:
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    together = normalised(model.encoder.encode(tokens))
    alone = normalised(np.concatenate([model.encoder.encode([text]) for text in tokens]))
    assert np.abs(together - alone).max() < 1e-5
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_it_means_something(model: LoadedEmbedder) -> None:
    texts = [
        "The cat sits outside",
        "A man is playing guitar",
        "A cat is on the lawn",
        "Someone strums a guitar",
    ]
    vectors = model.encoder.encode([model.tokenizer.encode(text) for text in texts])
    cats, cat_and_guitar = similarities(vectors[:1], vectors[2:])
    assert cats > 0.6 > 0.2 > cat_and_guitar
    # The figure that the documentation of sentence-transformers prints for this pair.
    assert similarities(vectors[:1], vectors[1:2])[0] == pytest.approx(0.0363, abs=1e-4)


async def test_on_an_mlx_thread_of_its_own(folder: Path) -> None:
    threads: set[str] = set()

    def load() -> LoadedEmbedder:
        threads.add(threading.current_thread().name)
        return load_embedder(folder, "minilm")

    embedder = EmbeddingEngine(load)
    try:
        await embedder.start()
        tokens = [embedder.tokenizer.encode(text) for text in TEXTS]
        alone = [await embedder.encode([text]) for text in tokens]
        before = embedder.stats().batches
        together = await asyncio.gather(*(embedder.encode([text]) for text in tokens))
        assert embedder.stats().batches - before < len(tokens)
        assert np.abs(np.concatenate(alone) - np.concatenate(together)).max() < 1e-5
        assert threads == {NAME}
    finally:
        await embedder.stop()
    assert embedder.draining and not embedder.wedged
