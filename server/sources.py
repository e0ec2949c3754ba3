"""Where the models that are to be served come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from chairlift.engine.embedding.types import LoadedEmbedder
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.plan import LoadedModel
from chairlift.server.served import ServeOptions

if TYPE_CHECKING:
    from chairlift.engine.models.resolve import ModelSource


def find_models(options: ServeOptions) -> tuple[ModelSource | None, ModelSource | None]:
    """The generating model and the embedding model, of which one may be absent.

    Raises:
        ModelUnavailable: one cannot be had, or both have one name.
    """
    from chairlift.engine.models.resolve import resolve_embedding_model, resolve_model

    source = embedding = None
    if options.model is not None or options.embedding_model is None:
        source = resolve_model(options.model, served_name=options.served_name, dtype=options.dtype)
    if options.embedding_model is not None:
        embedding = resolve_embedding_model(
            options.embedding_model, served_name=options.served_embedding_name
        )
    if source is not None and embedding is not None and source.served_name == embedding.served_name:
        raise ModelUnavailable(
            f"Both models would be called {source.served_name}; give --served-embedding-name."
        )
    return source, embedding


def generation_factory(options: ServeOptions, source: ModelSource) -> Callable[[], LoadedModel]:
    from chairlift.engine.models.loader import load_model  # imports mlx, which takes seconds

    return functools.partial(
        load_model,
        source.folder,
        source.served_name,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        kv_cache_dtype=options.kv_cache_dtype,
        chat_template=options.chat_template,
    )


def embedding_factory(options: ServeOptions, source: ModelSource) -> Callable[[], LoadedEmbedder]:
    from chairlift.engine.embedding.loader import load_embedder

    return functools.partial(
        load_embedder,
        source.folder,
        source.served_name,
        dtype=options.dtype,
        pooling=options.embedding_pooling,
    )
