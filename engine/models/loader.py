"""From a model folder to a `LoadedModel`: weights, patches, batching, runner. Runs on the MLX thread.

The only module that applies patches: explicitly, before a model is built.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_weights

from chairlift.cache.quantized import UnsupportedQuantization
from chairlift.engine.batching import Batching
from chairlift.engine.constraints import Compiler
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.memory.device import MlxDevice
from chairlift.engine.models.blocks import block_if_faster
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.identity import IMAGE_PACKAGES, model_identity, versions
from chairlift.engine.models.image_prefix import example_of
from chairlift.engine.models.images import Eyes
from chairlift.engine.models.quantization import AUTO, KV_TYPES, cache_factory
from chairlift.engine.models.sizes import measure_states, measure_step
from chairlift.engine.models.strides import lay_out_if_faster
from chairlift.engine.models.tokenizer import load_tokenizer, read_template
from chairlift.engine.models.vision_loader import load_images, load_seeing_model, needs_mlx_vlm
from chairlift.engine.models.warm import warm_up
from chairlift.engine.plan import LoadedModel, ModelInfo
from chairlift.engine.sampling import marks_of
from chairlift.patches import MLX, MLX_LM, MLX_VLM, apply_patches

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
DEFAULT_CONTEXT = 8192
"""Tokens, for configurations that state no length (recurrent families have no limit of their own)."""


def load_model(
    folder: Path,
    served_name: str,
    *,
    dtype: str | None = None,
    max_model_len: int | None = None,
    kv_cache_dtype: str = AUTO,
    chat_template: Path | None = None,
    memory: int | None = None,
) -> LoadedModel:
    """Load a model folder in mlx-lm's format.

    Args:
        folder: config.json, safetensors and tokenizer.
        served_name: the name clients use.
        dtype: "float32", "float16" or "bfloat16" for unquantized weights; None is float32 on the CPU (where
            half precision is many times slower) and the folder's own elsewhere.
        max_model_len: tokens of prompt and answer together, at most the model's own context.
        kv_cache_dtype: "auto", "int8" or "int4" (docs/kv-cache.md).
        chat_template: a file of Jinja in place of the model's own.
        memory: bytes that are left beside the weights; None: what the device has.

    Raises:
        ModelUnavailable: the folder cannot be read as a model, or not served as asked; one line.
    """
    if kv_cache_dtype not in KV_TYPES:
        raise ModelUnavailable(
            f"--kv-cache-dtype {kv_cache_dtype} is unknown; choose from {', '.join(KV_TYPES)}."
        )
    template = None if chat_template is None else read_template(chat_template)
    tokenizer = load_tokenizer(folder, template)
    model, config = open_model(folder, served_name)
    cast_weights(model, dtype)
    mx.eval(model.parameters())
    context = context_length(config)
    if max_model_len is not None:
        if max_model_len > context:
            raise ModelUnavailable(
                f"--max-model-len {max_model_len} exceeds the model's context of {context} tokens."
            )
        context = max_model_len
    vocab, family = vocab_size(config, tokenizer.vocab_size), str(config.get("model_type", ""))
    blocks = 0
    if mx.default_device() == mx.cpu:
        blocks = block_if_faster(model, vocab, MlxDevice().usable() if memory is None else memory)
        if not blocks:
            lay_out_if_faster(model, vocab)
    try:
        processor = load_images(folder, model, template)
        sight = Eyes(model.inner) if processor is not None else None
        finding, runner = make_runner(
            model,
            vocab,
            sight=sight,
            example=example_of(processor),
            kv_cache_dtype=kv_cache_dtype,
            marks=marks_of(tokenizer),
        )
    except UnsupportedQuantization as error:
        raise ModelUnavailable(
            f"{served_name} ({family}) cannot be served with --kv-cache-dtype {kv_cache_dtype}: {error}."
        ) from error
    if mx.default_device() != mx.cpu:
        warm_up(runner, vocab, context, together=finding.batching is not Batching.SOLO)
    kv_bytes, kv_type = _kv_of_a_token(model, vocab, kv_cache_dtype)
    make_cache = cache_factory(model, kv_cache_dtype)
    states = measure_states(model, vocab, make_cache, finding.batching, image_bytes=hidden_size(config) * 8)
    parameters = tree_flatten(model.parameters())
    info = ModelInfo(
        name=served_name,
        context_length=context,
        created=int(time.time()),
        architecture=family,
        batching=str(finding.batching),
        device=device_name(),
        dtype=_dtype_name(model, config),
        parameters=_parameter_count(model),
        weight_bytes=sum(array.nbytes for _, array in parameters) + blocks,
        step_tokens=step_tokens(),
        kv_bytes_per_token=kv_bytes,
        kv_dtype=kv_type,
        vision=processor is not None,
        scores_prompts=not finding.whole_prompts,
        memory_bytes=_memory(),
        vocab_size=vocab,
        activation_bytes=measure_step(runner, vocab, step_tokens()),
    )
    constraints = Compiler(tokenizer.grammar_vocabulary)
    circumstances = (
        *(str(dtype), info.dtype, kv_cache_dtype, info.kv_dtype),
        *(info.device, str(mx.default_device()), str(finding.batching), repr(runner.prefix)),
        *(versions(IMAGE_PACKAGES) if processor is not None else ()),
    )
    identity = partial(model_identity, folder, *circumstances)
    return LoadedModel(
        *(info, tokenizer, runner, processor, runner.prefix, constraints, identity),
        states=states,
        device=MlxDevice(),
    )


def open_model(folder: Path, name: str, *, lazy: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """The model by the package whose it is, patched before it is built, and its configuration.

    Args:
        name: for messages.
        lazy: read no weights yet.

    Raises:
        ModelUnavailable: the folder cannot be read as a model.
    """
    try:
        if needs_mlx_vlm(folder):
            apply_patches((MLX, MLX_LM, MLX_VLM))
            return load_seeing_model(folder)
        apply_patches()
        model, config = load_weights(folder, lazy=lazy)
        return model, config
    except ModelUnavailable:
        raise
    except Exception as error:
        raise ModelUnavailable(f"{name} cannot be loaded: {_one_line(error, folder)}") from error


def context_length(config: dict[str, Any]) -> int:
    """Tokens that a model's configuration states as its context."""
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


def vocab_size(config: dict[str, Any], fallback: int) -> int:
    """Rows of the embedding, which may exceed the tokenizer's vocabulary."""
    for part in (config, config.get("text_config") or {}):
        value = part.get("vocab_size")
        if isinstance(value, int) and value > 0:
            return value
    return fallback


def hidden_size(config: dict[str, Any]) -> int:
    """Numbers of a token between layers; 0 where the configuration does not say."""
    parts = (config, config.get("text_config") or {})
    return max((size for part in parts if isinstance(size := part.get("hidden_size"), int)), default=0)


def cast_weights(model: nn.Module, dtype: str | None) -> None:
    """Cast floating weights, where none are quantized: their scales belong to their own type."""
    if dtype is not None and dtype not in DTYPES:
        raise ModelUnavailable(f"--dtype {dtype} is unknown; choose from {', '.join(DTYPES)}.")
    on_cpu = mx.default_device() == mx.cpu
    wanted = DTYPES[dtype] if dtype is not None else mx.float32 if on_cpu else None
    if wanted is None:
        return
    predicate = getattr(model, "cast_predicate", None)
    keep = predicate if predicate is not None and wanted != mx.float32 else lambda name: True
    made: dict[int, mx.array] = {}  # one for modules that share a weight
    cast = {
        name: made.setdefault(id(array), array.astype(wanted))
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating) and array.dtype in DTYPES.values() and keep(name)
    }
    model.load_weights(list(cast.items()), strict=False)


def _kv_of_a_token(model: nn.Module, vocab: int, kv_cache_dtype: str) -> tuple[int, str]:
    """Bytes that one more token adds to a row's attention caches, and their type."""
    caches = cache_factory(model, kv_cache_dtype)()
    kind = "" if kv_cache_dtype == AUTO else kv_cache_dtype
    mx.eval(model(mx.array([[min(16, vocab - 1)] * 2]), cache=caches))
    total = 0
    for _, array in tree_flatten([getattr(cache, "state", None) for cache in caches]):
        if isinstance(array, mx.array) and array.ndim == 4 and array.shape[2] >= 2:
            total += array.nbytes // array.shape[2]
            kind = kind or str(array.dtype).rpartition(".")[2]
    return total, kind


def _parameter_count(model: nn.Module) -> int:
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))


def _dtype_name(model: nn.Module, config: dict[str, Any]) -> str:
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"{quantization['bits']}-bit"
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    for name, kind in DTYPES.items():
        if kind in kinds:
            return name
    return ""


def step_tokens() -> int:
    """Token budget of a step: large, for the weights are read once a step; while answers run, chunks are
    smaller (`chairlift.engine.pace`). On two CPU cores 256 tokens of the embedded model take 1.6 s."""
    if mx.default_device() == mx.cpu:
        return 256
    return 1024 if mx.cuda.is_available() else 512


def device_name() -> str:
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    name = str(info.get("device_name", "")).strip()
    return name or ("CPU" if mx.default_device() == mx.cpu else "GPU")


def _memory() -> int:
    """Bytes that may be used of the device's memory."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _one_line(error: Exception, folder: Path) -> str:
    """An upstream error without its path."""
    if isinstance(error, KeyError):
        return f"its configuration lacks {error}."
    told = str(error).replace(str(folder), "the folder")
    first, *others = [line.strip() for line in told.splitlines()] or [""]
    text = f"{first} {others[0]} …" if others and first.endswith(":") else first
    return text or type(error).__name__


__all__ = [
    "context_length",
    "device_name",
    "hidden_size",
    "load_model",
    "make_runner",
    "step_tokens",
    "vocab_size",
]
