"""`chairlift serve`"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Console

from chairlift.engine.quantities import count, size
from chairlift.server.complaint import complain, heard
from chairlift.server.configuration.read import Outcome
from chairlift.server.configuration.serving import serve_options
from chairlift.server.configuration.types import parse_size
from chairlift.server.log_file import LogFile
from chairlift.server.observe.logs import set_up_logging
from chairlift.server.served import EmbeddingServing, Serving, Standby

if TYPE_CHECKING:
    from chairlift.engine.embedding.types import EmbeddingModelInfo

logger = logging.getLogger("chairlift.server")


def serve(outcome: Outcome) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    from chairlift.server.serve import run_server

    configuration = outcome.configuration
    file = None
    if (path := configuration.log_file) is not None:
        try:
            file = LogFile(path, parse_size(configuration.log_file_size) or 0)
        except OSError as error:
            complain(f"The log {path} cannot be written: {error.strerror or error}.")
            return 1
    set_up_logging(
        configuration.log_level, configuration.log_format, access_log=configuration.access_log, file=file
    )
    with heard(logger.error) if file is not None else nullcontext():
        return run_server(serve_options(configuration), announce, complain)


def announce(serving: Serving | EmbeddingServing | Standby) -> None:
    """Tell the operator what is served, where, and how to try it."""
    if isinstance(serving, Standby):
        names = ", ".join(serving.names)
        Console(highlight=False).print(f"Loaded on demand: {names}", soft_wrap=True, markup=False)
        return
    lines = _lines(serving) if isinstance(serving, Serving) else _embedding_lines(serving.info)
    console = Console(highlight=False)
    console.print(
        f"[bold]Chairlift {version('chairlift')}[/] serves [bold]{serving.info.name}[/] at {serving.url}/v1",
        soft_wrap=True,
    )
    for title, text in lines.items():
        console.print(f"  {title:8}{text}", soft_wrap=True, markup=False)
    console.print("Try it:", serving.curl, sep="\n", soft_wrap=True, markup=False)
    console.file.flush()


def _embedding_lines(info: EmbeddingModelInfo) -> dict[str, str]:
    model = f"{info.architecture}, {count(info.parameters)} parameters, {info.dtype}"
    makes = f"vectors of {info.dimensions} numbers, pooled by {info.pooling}" if info.pooling else "scores"
    return {
        "model": f"{model}, texts of up to {info.context_length:,} tokens",
        "device": info.device,
        "makes": makes,
        "batch": f"up to {info.batch_tokens} tokens"
        + ("" if info.padding else "; only texts of one length together, since padding changes its answers"),
        "memory": f"weights {size(info.weight_bytes)}",
    }


def _lines(serving: Serving) -> dict[str, str]:
    info, config = serving.info, serving.config
    longest = min(serving.longest or info.context_length, info.context_length)
    model = f"{info.architecture}, {count(info.parameters)} parameters, {info.dtype}"
    if info.vision:
        model += ", takes images"
    requests = f"up to {config.max_num_seqs} requests at once ({info.batching}), {config.max_waiting} waiting"
    cache = "no KV cache"
    if token := info.kv_bytes_per_token:
        kind = f"{info.kv_dtype} " if info.kv_dtype else ""
        cache = f"KV {kind}{size(token)} a token, at most {size(token * longest)} a request"
    kept = config.prefix_cache_bytes or 0
    prefix = f"up to {size(kept)} kept for later requests" if kept else "not kept"
    if kept and config.prefix_cache_disk_bytes:
        prefix += f", and {size(config.prefix_cache_disk_bytes)} on the disk"
    context = f"context of {info.context_length:,} tokens"
    if longest < info.context_length:
        context += f", of which there is memory for {longest:,} (--memory-limit)"
    return {
        "model": f"{model}, {context}",
        "device": info.device,
        "batch": f"{requests}, {config.max_num_batched_tokens} tokens a step",
        "memory": f"weights {size(info.weight_bytes)}, {cache}",
        "prefix": prefix,
    }
