"""From the models that an operator names to those that can be served."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.engine.embedding.engine import EmbeddingConfig, EmbeddingEngine
from chairlift.engine.embedding.types import LoadedEmbedder
from chairlift.engine.engine import Engine, EngineObserver
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.budget import Budget, Reservation
from chairlift.engine.plan import LoadedModel
from chairlift.server.models.model import Found, ModelSpec, Use
from chairlift.server.served import ModelOptions

if TYPE_CHECKING:
    from chairlift.engine.models.resolve import ModelSource

Observe = Callable[[str], EngineObserver]
"""The observer of a model's engine, by its name."""


def specs_of(options: Sequence[ModelOptions], observe: Observe) -> list[ModelSpec]:
    """What is to be served. Those that are loaded at the start are found at once, which may take minutes.

    Raises:
        ModelUnavailable: one cannot be had.
    """
    specs = [spec_of(each, observe) for each in options]
    return [replace(spec, found=spec.find()) if spec.at_start else spec for spec in specs]


def spec_of(options: ModelOptions, observe: Observe) -> ModelSpec:
    """Without looking further than this machine. Raises: ModelUnavailable: nothing can be meant by it."""
    from chairlift.engine.models.described import described
    from chairlift.engine.models.resolve import model_path

    told = described(options.model, embedding=options.use is Use.EMBEDDING)
    name = options.name or told.name
    use = options.use or (None if told.embedding is None else _use(told.embedding))
    context = told.context_length
    if context is not None and options.max_model_len is not None:
        context = min(context, options.max_model_len)
    look = functools.partial(find, options, name, observe)
    if options.model is not None and (path := model_path(options.model)).exists():
        look = functools.partial(_find_still, path, look)
    return ModelSpec(
        name,
        look,
        aliases=options.aliases,
        use=use,
        context_length=context,
        at_start=options.at_start,
        pinned=options.pinned,
        idle_unload_s=options.idle_unload_s,
        parsers=options.parsers,
        defaults=options.defaults,
        created=int(time.time()),
    )


def _use(embedding: bool) -> Use:
    return Use.EMBEDDING if embedding else Use.GENERATION


def _find_still(path: Path, find: Callable[[], Found]) -> Found:
    """Of a folder or file that was there once: what it is called like on the hub was not meant."""
    if not path.exists():
        raise ModelUnavailable(f"The model's files are gone: {path} is no longer there.")
    return find()


def find(options: ModelOptions, name: str, observe: Observe) -> Found:
    """Have its files here. Blocks. Raises: ModelUnavailable."""
    from chairlift.engine.models.described import is_embedding_folder, loading_bytes
    from chairlift.engine.models.resolve import resolve_embedding_model, resolve_model

    if options.use is Use.EMBEDDING:
        assert options.model is not None
        source = resolve_embedding_model(options.model, served_name=name)
    else:
        source = resolve_model(options.model, served_name=name, dtype=options.dtype)
    use = options.use or _use(is_embedding_folder(source.folder))
    size = loading_bytes(source.folder, options.dtype)
    if use is Use.EMBEDDING:
        config = EmbeddingConfig(max_waiting=options.engine.max_waiting)

        def embed(budget: Budget | None, weights: Reservation | None) -> EmbeddingEngine:
            factory = embedding_factory(options, source)
            return EmbeddingEngine(factory, config, budget=budget, weights=weights)

        return Found(use, size, embed)

    def make(budget: Budget | None, weights: Reservation | None) -> Engine:
        return Engine(
            generation_factory(options, source, budget.available if budget is not None else None),
            options.engine,
            observer=observe(name),
            budget=budget,
            weights=weights,
        )

    return Found(use, size, make)


def usable_memory() -> int:
    """Bytes of the device that the process may use; 0: not known."""
    from chairlift.engine.memory.device import MlxDevice

    return MlxDevice().usable()


def generation_factory(
    options: ModelOptions, source: ModelSource, memory: int | None = None
) -> Callable[[], LoadedModel]:
    """
    Args:
        memory: bytes that are left for it beside its weights; None: not known.
    """
    from chairlift.engine.models.loader import load_model  # imports mlx, which takes seconds

    return functools.partial(
        load_model,
        source.folder,
        source.served_name,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        kv_cache_dtype=options.kv_cache_dtype,
        chat_template=options.chat_template,
        memory=memory,
    )


def embedding_factory(options: ModelOptions, source: ModelSource) -> Callable[[], LoadedEmbedder]:
    from chairlift.engine.embedding.loader import load_embedder

    return functools.partial(
        load_embedder,
        source.folder,
        source.served_name,
        dtype=options.dtype,
        pooling=options.pooling,
    )
