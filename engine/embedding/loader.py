"""From a model folder to a `LoadedEmbedder`. Runs on the MLX thread."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from chairlift.engine.blas import find_blas
from chairlift.engine.embedding.encoder import MlxEncoder, measure, padding_is_harmless
from chairlift.engine.embedding.families import Config, Family, family_of, make_layers
from chairlift.engine.embedding.files import read_json, read_weights
from chairlift.engine.embedding.heads import Head, is_cross_encoder, score_head
from chairlift.engine.embedding.pooling import Dense, Pipeline, Pooling, pool, read_pipeline
from chairlift.engine.embedding.tokenizer import load_pair_tokenizer
from chairlift.engine.embedding.types import EmbeddingModelInfo, LoadedEmbedder, Task, TokenizedText
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.device import MlxDevice
from chairlift.engine.models.loader import DTYPES, device_name
from chairlift.patches import MLX, apply_patches

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192
"""Tokens, for configurations that state no length."""


def load_embedder(
    folder: Path, served_name: str, *, dtype: str | None = None, pooling: str | None = None
) -> LoadedEmbedder:
    """Load an embedding model or a cross-encoder.

    Args:
        folder: config.json, safetensors and a tokenizer, and what sentence-transformers adds to them.
        served_name: the name clients use.
        dtype: "float32", "float16" or "bfloat16" for unquantized weights; None is float32 on the CPU and the
            folder's own elsewhere.
        pooling: one of `Pooling`, in place of what the folder says.

    Raises:
        ModelUnavailable: the folder cannot be read as such a model, or not served as asked; one line.
    """
    apply_patches((MLX,))
    config = read_json(folder / "config.json", dict)
    family = family_of(config, served_name)
    pipeline = read_pipeline(folder, served_name)
    tokenizer = load_pair_tokenizer(folder)
    weights = read_weights(folder)
    layers = make_layers(family, config)
    scores = is_cross_encoder(config)
    if family.pooler and not scores:
        layers.pooler = _no_pooler
    _load_weights(layers, config, family, weights, served_name)
    _cast(layers, _wanted(dtype, family, layers))
    layers.eval()
    mx.eval(layers.parameters())
    how = Pooling(pooling) if pooling is not None else pipeline.pooling
    if scores:
        head = score_head(config, weights, layers, served_name)
    else:
        if how is None:
            how = family.pooling
            log.warning("%s does not say how its tokens are pooled; %s is assumed.", served_name, how)
        head = _embedding_head(how, pipeline, weights, served_name)
    vocab = int(config["vocab_size"])
    context = _context_length(folder, config, family)
    states = partial(family.hidden, layers)
    pad = config.get("pad_token_id")
    pad = pad if isinstance(pad, int) and 0 <= pad < vocab else 0
    blas = find_blas() if mx.default_device() == mx.cpu else None
    encoder = MlxEncoder(states, head, pad, blas)
    padding = padding_is_harmless(encoder, vocab, context)
    width = encoder.encode([TokenizedText((0,))]).shape[1]
    parameters = int(get_total_parameters(layers))
    batch_tokens = _batch_tokens(parameters, config)
    info = EmbeddingModelInfo(
        name=served_name,
        context_length=context,
        dimensions=width,
        vocab_size=vocab,
        created=int(time.time()),
        task=Task.SCORE if scores else Task.EMBED,
        architecture=str(config["model_type"]),
        pooling="" if scores else str(how),
        padding=padding,
        batch_tokens=batch_tokens,
        device=device_name(),
        dtype=_dtype_name(layers, config),
        parameters=parameters,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(layers.parameters())),
        batch_cost=measure(encoder, vocab, min(batch_tokens, context)),
    )
    return LoadedEmbedder(info, tokenizer, encoder, MlxDevice())


def _no_pooler(hidden: mx.array) -> mx.array:
    return hidden


def _load_weights(
    layers: nn.Module, config: Config, family: Family, weights: dict[str, mx.array], name: str
) -> None:
    """Every weight of the layers from the files; what else is in them (heads, buffers) is left.

    Raises:
        ModelUnavailable: one is missing or has another shape.
    """
    given: dict[str, mx.array] = {}
    for key, array in weights.items():
        prefix = next((prefix for prefix in family.prefixes if key.startswith(prefix)), "")
        given[key.removeprefix(prefix)] = array
    _quantize(layers, config, family, given)
    wanted = dict(tree_flatten(layers.parameters()))
    for key, array in wanted.items():
        if key not in given:
            raise ModelUnavailable(f"{name} lacks the weight {key}.")
        if given[key].shape != array.shape:
            raise ModelUnavailable(
                f"{name}: the weight {key} has the shape {given[key].shape}, not {array.shape}."
            )
    layers.load_weights([(key, given[key]) for key in wanted])


def _quantize(layers: nn.Module, config: Config, family: Family, given: dict[str, mx.array]) -> None:
    """Make those layers quantized whose weights are."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, dict) or "bits" not in settings:
        return

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        for prefix in ("", *family.prefixes):
            own = settings.get(prefix + path)
            if isinstance(own, dict):
                return own
        return hasattr(module, "to_quantized") and f"{path}.scales" in given

    nn.quantize(
        layers,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=how,
    )


def _wanted(dtype: str | None, family: Family, layers: nn.Module) -> mx.Dtype | None:
    """The type to cast to; None leaves the weights as they are."""
    if dtype is not None and dtype not in DTYPES:
        raise ModelUnavailable(f"--dtype {dtype} is unknown; choose from {', '.join(DTYPES)}.")
    kinds = {array.dtype for _, array in tree_flatten(layers.parameters())}
    asked = DTYPES[dtype] if dtype is not None else None
    if asked is None and mx.default_device() == mx.cpu:
        asked = mx.float32
    if not family.float16 and (asked == mx.float16 or (asked is None and mx.float16 in kinds)):
        return mx.float32
    return asked


def _cast(layers: nn.Module, dtype: mx.Dtype | None) -> None:
    if dtype is None:
        return
    cast = {
        name: array.astype(dtype)
        for name, array in tree_flatten(layers.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    layers.load_weights(list(cast.items()), strict=False)


def _embedding_head(how: Pooling, pipeline: Pipeline, weights: dict[str, mx.array], name: str) -> Head:
    """Pooling, then the dense layers: those of the folder's modules, or among the model's own weights, where
    mlx-embeddings' conversion puts them."""
    dense = pipeline.dense
    if "dense.0.weight" in weights:
        if "dense.0.scales" in weights:
            raise ModelUnavailable(f"{name} has quantized dense layers, which are not supported.")
        own = (weights.get(f"dense.{index}.weight") for index in range(len(weights)))
        dense = tuple(Dense(weight.astype(mx.float32)) for weight in own if weight is not None)

    def embed(hidden: mx.array, mask: mx.array) -> mx.array:
        vectors = pool(hidden, mask, how)
        for layer in dense:
            vectors = layer(vectors)
        return vectors

    return embed


def _context_length(folder: Path, config: Config, family: Family) -> int:
    """Tokens that a text may have: what the table of positions holds, or less where the folder says so."""
    positions = config.get("max_position_embeddings")
    context = positions - family.positions_from if isinstance(positions, int) else DEFAULT_CONTEXT
    said = folder / "sentence_bert_config.json"
    longest = read_json(said, dict).get("max_seq_length") if said.is_file() else None
    if isinstance(longest, int) and longest > 0:
        context = min(context, longest)
    return context


CPU_WORK, GPU_WORK = 1.2e10, 2e12
"""Multiplications and additions of a batch: half a second on two CPU cores, at a guess a fraction of it on
the slower GPUs."""


def _batch_tokens(parameters: int, config: Config) -> int:
    """Tokens of a batch, so that a step that waits for one does not wait long. Tables of embeddings cost
    nothing: a token takes two operations for each of the other parameters."""
    on_cpu = mx.default_device() == mx.cpu
    table = int(config["vocab_size"]) * int(config["hidden_size"])
    tokens = (CPU_WORK if on_cpu else GPU_WORK) / (2 * max(1, parameters - table))
    return int(min(max(tokens, 64), 512 if on_cpu else 8192))


def _dtype_name(layers: nn.Module, config: Config) -> str:
    kinds = {array.dtype for _, array in tree_flatten(layers.parameters())}
    if mx.uint32 in kinds:
        return f"{(config.get('quantization') or config['quantization_config'])['bits']}-bit"
    return next((name for name, kind in DTYPES.items() if kind in kinds), "")
