"""What a server is built from, by its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from chairlift.engine.config import EngineConfig
from chairlift.server.configuration.fields import Configuration
from chairlift.server.configuration.models import ModelTable, split_name
from chairlift.server.configuration.read import ConfigurationError
from chairlift.server.configuration.secrets import security_settings
from chairlift.server.configuration.types import LoadTime, MetricsAlias, parse_size, store_path
from chairlift.server.models.model import Use
from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.observe.traces import is_asked_for
from chairlift.server.served import ModelOptions, ServeOptions
from chairlift.server.settings import (
    WEDGED_S,
    MediaSettings,
    ParserSettings,
    ResponsesSettings,
    ServerSettings,
)

MEBIBYTE = 2**20


def serve_options(given: Configuration) -> ServeOptions:
    return ServeOptions(
        models=tuple(model_options(given)),
        host=given.host,
        port=given.port,
        drain_timeout=given.drain_timeout,
        memory_limit_bytes=parse_size(given.memory_limit),
        load_timeout=given.load_timeout,
        watchdog_s=given.watchdog,
        settings=server_settings(given),
    )


def model_options(given: Configuration) -> Iterator[ModelOptions]:
    """Of --model, of the tables, and of --embedding-model; of the embedded model where there are none."""
    name, *aliases = given.served_model_name or (None,)
    tables = [_named(each) for each in given.model]
    if not (tables or given.models or given.embedding_model is not None):
        tables = [ModelTable()]
    for table in tables:
        yield _options(table, given, name, (each for each in aliases if each is not None))
    for table in given.models:
        yield _options(table, given)
    if given.embedding_model is not None:
        table = ModelTable(model=given.embedding_model, name=given.served_embedding_name, use=Use.EMBEDDING)
        yield _options(table, given)


def check_names(options: Sequence[ModelOptions]) -> None:
    """Raises: ConfigurationError: a name would not mean one model."""
    if len(options) == 1 and not options[0].aliases:
        return
    from chairlift.engine.models.resolve import default_name  # takes half a second

    names = Counter(
        name for each in options for name in (each.name or default_name(each.model), *each.aliases)
    )
    name, times = names.most_common(1)[0]
    if times > 1:
        raise ConfigurationError(
            f"Two models would be called {name}, or one of them twice; a name means one model."
        )


def _named(text: str) -> ModelTable:
    called, model = split_name(text)
    return ModelTable(model=model, name=called.removesuffix("=") or None)


def _options(
    table: ModelTable, given: Configuration, name: str | None = None, aliases: Iterable[str] = ()
) -> ModelOptions:
    idle = given.idle_unload if table.idle_unload is None else table.idle_unload
    return ModelOptions(
        model=table.model,
        name=name or table.name,
        aliases=(*aliases, *table.aliases),
        use=table.use,
        dtype=table.dtype or given.dtype,
        max_model_len=table.max_model_len or given.max_model_len,
        kv_cache_dtype=table.kv_cache_dtype or given.kv_cache_dtype,
        chat_template=table.chat_template or given.chat_template,
        pooling=table.pooling or given.embedding_pooling,
        parsers=_parsers(table, given),
        engine=engine_config(table, given),
        defaults=table.defaults.model_dump(exclude_none=True),
        at_start=(table.load or given.load) is LoadTime.STARTUP,
        pinned=table.pin,
        idle_unload_s=idle or None,
    )


def _parsers(table: ModelTable, given: Configuration) -> ParserSettings | None:
    """None: as all are read."""
    if table.reasoning_parser is None and table.tool_call_parser is None:
        return None
    return ParserSettings(
        table.reasoning_parser or given.reasoning_parser, table.tool_call_parser or given.tool_call_parser
    )


def engine_config(table: ModelTable, given: Configuration) -> EngineConfig:
    def own(name: str) -> Any:
        value = getattr(table, name)
        return getattr(given, name) if value is None else value

    return EngineConfig(
        max_num_seqs=own("max_num_seqs"),
        max_num_batched_tokens=own("max_num_batched_tokens"),
        max_step_ms=own("max_step_ms"),
        max_waiting=own("max_waiting"),
        memory_limit_bytes=parse_size(given.memory_limit),
        prefix_cache_bytes=parse_size(own("prefix_cache_ram")),
        prefix_cache_disk_bytes=parse_size(given.prefix_cache_disk) or 0,
        prefix_cache_folder=given.prefix_cache_dir,
    )


def _unready_after_s(watchdog_s: float) -> float:
    """Seconds in a step: load balancers hear of it before the watchdog ends the process."""
    return min(WEDGED_S, watchdog_s / 2) if watchdog_s else WEDGED_S


def server_settings(given: Configuration) -> ServerSettings:
    store = given.responses_store
    return ServerSettings(
        max_body_bytes=round(given.body_limit * MEBIBYTE),
        body_patience_s=given.body_timeout,
        wedge_after_s=_unready_after_s(given.watchdog),
        media=MediaSettings(
            local_folder=given.allow_local_media,
            allow_private=given.allow_private_media,
            timeout_s=given.media_timeout,
            max_bytes=round(given.media_limit * MEBIBYTE),
            max_total_bytes=round(4 * given.media_limit * MEBIBYTE),
        ),
        responses=ResponsesSettings(
            keep=store != "off",
            path=store_path(store),
            max_count=given.responses_count,
            max_bytes=round(given.responses_limit * MEBIBYTE),
            max_age_s=given.responses_days * 86400,
        ),
        parsers=ParserSettings(given.reasoning_parser, given.tool_call_parser),
        observe=ObserveSettings(
            access_log=given.access_log,
            log_prompts=given.log_prompts,
            vllm_names=given.metrics_alias is MetricsAlias.VLLM,
            traces=is_asked_for(given.otlp_endpoint),
            otlp_endpoint=given.otlp_endpoint,
        ),
        security=security_settings(given),
    )
