"""`chairlift serve`"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from chairlift.server.cli.complaint import complain
from chairlift.server.served import EmbeddingServing, Serving

if TYPE_CHECKING:
    from chairlift.engine.embedding.types import EmbeddingModelInfo

MEBIBYTE = 2**20


class FloatType(StrEnum):
    """Of the weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class KVType(StrEnum):
    """Of the keys and values."""

    AUTO = "auto"
    INT8 = "int8"
    INT4 = "int4"


class PoolingType(StrEnum):
    """Names of sentence-transformers."""

    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST = "lasttoken"


class LogLevel(StrEnum):
    """Least severe messages that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder, a GGUF file, or org/name on the Hugging Face hub. "
            "Left out, a small embedded model is served.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name clients use; the folder's or repository's by default.")
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="An embedding model or a cross-encoder: a folder, or org/name on the hub. Served beside "
            "--model, or alone where that is left out.",
            show_default=False,
        ),
    ] = None,
    served_embedding_name: Annotated[
        str | None, typer.Option(help="The name clients use for the embedding model; as for --model.")
    ] = None,
    embedding_pooling: Annotated[
        PoolingType | None,
        typer.Option(help="How one vector is made of a text's tokens; by default as the folder says."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    dtype: Annotated[
        FloatType | None, typer.Option(help="Type of the weights; by default what suits the device.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests answered at once.")] = 32,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens a step computes at most; long prompts are cut to fit. The default suits the device.",
        ),
    ] = None,
    max_step_ms: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Milliseconds that a step may take while answers run; prompts are cut to fit. By default "
            "five times a step that only decodes, or 50 if that is more.",
            show_default=False,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait for a place; further ones get a 429.")
    ] = 256,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompt and answer together, if fewer than the model's."),
    ] = None,
    kv_cache_dtype: Annotated[
        KVType,
        typer.Option(
            help="Type that keys and values are kept in; auto is the model's own. Families that cannot keep "
            "them in 8 or 4 bits do not start with these."
        ),
    ] = KVType.AUTO,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model marks its thinking (docs/tools-and-reasoning.md); none reads nothing. "
            "By default found from its chat template and tokens.",
            show_default=False,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools; none reads nothing. By default found likewise.",
            show_default=False,
        ),
    ] = None,
    prefix_cache_ram: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory for prefixes of earlier requests: a size such as 8GB or 512MiB, off, or auto, a "
            "tenth of the device's memory beside the weights.",
        ),
    ] = "auto",
    prefix_cache_disk: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Files for prefixes beyond memory's, which outlast the server: a size of all models' "
            "together, or off.",
        ),
    ] = "off",
    prefix_cache_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of these files; several servers may share it. By default below the user's cache "
            "folder.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with the chat template (Jinja) to use in place of the model's own.",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that running answers get to finish after SIGTERM.")
    ] = 30.0,
    body_limit: Annotated[float, typer.Option(min=0.001, help="Largest request body, in MiB.")] = 32.0,
    allow_local_media: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder below which clients may name image files; none by default.",
            show_default=False,
        ),
    ] = None,
    allow_private_media: Annotated[
        bool, typer.Option("--allow-private-media", help="Fetch images from private addresses, too.")
    ] = False,
    media_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that fetching one image may take.")
    ] = 10.0,
    media_limit: Annotated[float, typer.Option(min=0.001, help="Largest image file, in MiB.")] = 20.0,
    responses_store: Annotated[
        str,
        typer.Option(
            metavar="PATH|memory|off",
            help="Where /v1/responses keeps what later requests refer to: an SQLite file, memory, or off.",
        ),
    ] = "memory",
    responses_limit: Annotated[
        float, typer.Option(min=0.001, help="MiB of responses kept; the least recently used go first.")
    ] = 256.0,
    responses_count: Annotated[int, typer.Option(min=1, help="Responses kept at most.")] = 10_000,
    responses_days: Annotated[
        float, typer.Option(min=0.001, help="Days since its last use that a response is kept.")
    ] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages to log.")] = LogLevel.WARNING,
) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    from chairlift.engine.config import EngineConfig
    from chairlift.engine.output.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
    from chairlift.server.serve import ServeOptions, run_server
    from chairlift.server.settings import MediaSettings, ParserSettings, ResponsesSettings, ServerSettings

    set_up_logging(log_level, access_log=access_log)
    _check_parser("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    _check_parser("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    prefix_bytes = parse_size(prefix_cache_ram, "--prefix-cache-ram")
    disk_bytes = parse_size(prefix_cache_disk, "--prefix-cache-disk")
    if disk_bytes is None or (disk_bytes and prefix_bytes == 0):
        what = "auto is no size here." if disk_bytes is None else "It needs --prefix-cache-ram."
        raise typer.BadParameter(what, param_hint="--prefix-cache-disk")
    options = ServeOptions(
        model=model,
        served_name=served_model_name,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        chat_template=chat_template,
        host=host,
        port=port,
        drain_timeout=drain_timeout,
        access_log=access_log,
        embedding_model=embedding_model,
        served_embedding_name=served_embedding_name,
        embedding_pooling=embedding_pooling,
        engine=EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_step_ms=max_step_ms,
            max_waiting=max_waiting,
            prefix_cache_bytes=prefix_bytes,
            prefix_cache_disk_bytes=disk_bytes,
            prefix_cache_folder=prefix_cache_dir,
        ),
        settings=ServerSettings(
            max_body_bytes=round(body_limit * MEBIBYTE),
            media=MediaSettings(
                local_folder=allow_local_media,
                allow_private=allow_private_media,
                timeout_s=media_timeout,
                max_bytes=round(media_limit * MEBIBYTE),
                max_total_bytes=round(4 * media_limit * MEBIBYTE),
            ),
            responses=ResponsesSettings(
                keep=responses_store != "off",
                path=None if responses_store in ("memory", "off") else Path(responses_store),
                max_count=responses_count,
                max_bytes=round(responses_limit * MEBIBYTE),
                max_age_s=responses_days * 86400,
            ),
            parsers=ParserSettings(reasoning_parser, tool_call_parser),
        ),
    )
    return run_server(options, announce, complain)


def _check_parser(option: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise typer.BadParameter(f"{name!r} is unknown; choose from {', '.join(known)}.", param_hint=option)


def set_up_logging(level: LogLevel, *, access_log: bool = False) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)


def announce(serving: Serving | EmbeddingServing) -> None:
    """Tell the operator what is served, where, and how to try it."""
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
    model = f"{info.architecture}, {count(info.parameters)} parameters, {info.dtype}"
    if info.vision:
        model += ", takes images"
    requests = f"up to {config.max_num_seqs} requests at once ({info.batching}), {config.max_waiting} waiting"
    cache = "no KV cache"
    if token := info.kv_bytes_per_token:
        kind = f"{info.kv_dtype} " if info.kv_dtype else ""
        cache = f"KV {kind}{size(token)} a token, at most {size(token * info.context_length)} a request"
    kept = config.prefix_cache_bytes or 0
    prefix = f"up to {size(kept)} kept for later requests" if kept else "not kept"
    if kept and config.prefix_cache_disk_bytes:
        prefix += f", and {size(config.prefix_cache_disk_bytes)} on the disk"
    return {
        "model": f"{model}, context of {info.context_length:,} tokens",
        "device": info.device,
        "batch": f"{requests}, {config.max_num_batched_tokens} tokens a step",
        "memory": f"weights {size(info.weight_bytes)}, {cache}",
        "prefix": prefix,
    }


def parse_size(text: str, option: str) -> int | None:
    """Bytes of a size as people write it; 0 for `off`, None for `auto`.

    Raises:
        typer.BadParameter: neither.
    """
    word = text.strip().lower()
    if word in ("off", "auto"):
        return 0 if word == "off" else None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", word)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size such as 8GB or 512MiB.", param_hint=option)
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def size(count: int) -> str:
    """Bytes as people read them, in powers of 1000."""
    value, units = float(count), ["B", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def count(number: int) -> str:
    """A number of parameters, short."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
