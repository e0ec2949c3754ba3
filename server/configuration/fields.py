"""Every setting of `chairlift serve`. The package's docstring says how to add one."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from chairlift.server.configuration.about import About, Group, ReasoningParser, ToolCallParser
from chairlift.server.configuration.access import AccessFields
from chairlift.server.configuration.models import ModelTable
from chairlift.server.configuration.types import (
    ExistingFile,
    ExistingFolder,
    File,
    FloatType,
    Folder,
    KVType,
    LoadTime,
    LogFormat,
    LogLevel,
    MetricsAlias,
    PoolingType,
    Several,
    Size,
    parse_size,
)

PREFIX = "CHAIRLIFT_"
"""Of environment variables."""


def _some_size(text: str) -> str:
    if not parse_size(text):
        raise ValueError(f"{text} is no size here.")
    return text


class Configuration(AccessFields):
    """The outcome of flags, environment and file. `read.read` makes it."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    model: Annotated[
        Several,
        About(
            Group.MODELS,
            "A model folder, a GGUF file, or org/name on the Hugging Face hub, maybe with the name that "
            "clients use before it (NAME=...). Repeat it to serve several. Left out, a small embedded model "
            "is served.",
        ),
    ] = ()
    served_model_name: Annotated[
        Several,
        About(
            Group.MODELS,
            "The name clients use, where there is one --model; the folder's or repository's by default. "
            "Repeated: other names for it.",
        ),
    ] = ()
    models: Annotated[
        tuple[ModelTable, ...],
        About(Group.MODELS, "Models with settings of their own: see below.", "[[models]]", flag=False),
    ] = ()
    load: Annotated[
        LoadTime,
        About(Group.MODELS, "When models are loaded: at the start, or when a request asks for them."),
    ] = LoadTime.STARTUP
    load_timeout: Annotated[
        float,
        Field(ge=0),
        About(Group.MODELS, "Seconds that a request waits for its model to be loaded; a 503 after that."),
    ] = 300.0
    idle_unload: Annotated[
        float,
        Field(ge=0),
        About(Group.MODELS, "Seconds without a request after which a model is unloaded; 0: never."),
    ] = 0.0
    embedding_model: Annotated[
        str | None,
        About(
            Group.MODELS,
            "An embedding model or a cross-encoder: a folder, or org/name on the hub. Served beside "
            "--model, or alone where that is left out.",
        ),
    ] = None
    served_embedding_name: Annotated[
        str | None, About(Group.MODELS, "The name clients use for the embedding model; as for --model.")
    ] = None
    embedding_pooling: Annotated[
        PoolingType | None,
        About(Group.MODELS, "How one vector is made of a text's tokens; by default as the folder says."),
    ] = None
    dtype: Annotated[
        FloatType | None, About(Group.MODELS, "Type of the weights; by default what suits the device.")
    ] = None
    max_model_len: Annotated[
        int | None,
        Field(ge=1),
        About(Group.MODELS, "Tokens of prompt and answer together, if fewer than the model's."),
    ] = None
    kv_cache_dtype: Annotated[
        KVType,
        About(
            Group.MODELS,
            "Type that keys and values are kept in; auto is the model's own. Families that cannot keep "
            "them in 8 or 4 bits do not start with these.",
        ),
    ] = KVType.AUTO
    chat_template: Annotated[
        ExistingFile | None,
        About(Group.MODELS, "A file with the chat template (Jinja) to use in place of the model's own."),
    ] = None

    host: Annotated[str, About(Group.LISTENING, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), About(Group.LISTENING, "Port; 0 takes a free one.")] = 8000
    drain_timeout: Annotated[
        float,
        Field(ge=0),
        About(Group.LISTENING, "Seconds that running answers get to finish after SIGTERM."),
    ] = 30.0
    body_limit: Annotated[float, Field(ge=0.001), About(Group.LISTENING, "Largest request body, in MiB.")] = (
        32.0
    )

    max_num_seqs: Annotated[int, Field(ge=1), About(Group.REQUESTS, "Requests answered at once.")] = 32
    max_waiting: Annotated[
        int,
        Field(ge=0),
        About(Group.REQUESTS, "Requests that may wait for a place; further ones get a 429."),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Field(ge=1),
        About(
            Group.REQUESTS,
            "Tokens a step computes at most; long prompts are cut to fit. The default suits the device.",
        ),
    ] = None
    max_step_ms: Annotated[
        float | None,
        Field(ge=1),
        About(
            Group.REQUESTS,
            "Milliseconds that a step may take while answers run; prompts are cut to fit. By default "
            "five times a step that only decodes, or 50 if that is more.",
        ),
    ] = None

    memory_limit: Annotated[
        Size,
        About(
            Group.REQUESTS,
            "Memory that the server may use, or of a GPU with memory of its own what it may use of that: a "
            "size such as 48GB, auto, a share of what there is, or off (docs/memory.md).",
            "SIZE",
        ),
    ] = "auto"
    prefix_cache_ram: Annotated[
        Size,
        About(
            Group.PREFIXES,
            "Memory for prefixes of earlier requests: a size such as 8GB or 512MiB, off, or auto, a "
            "tenth of the device's memory beside the weights.",
            "SIZE",
        ),
    ] = "auto"
    prefix_cache_disk: Annotated[
        Size,
        About(
            Group.PREFIXES,
            "Files for prefixes beyond memory's, which outlast the server: a size of all models' "
            "together, or off.",
            "SIZE",
        ),
    ] = "off"
    prefix_cache_dir: Annotated[
        Folder | None,
        About(
            Group.PREFIXES,
            "Folder of these files; several servers may share it. By default below the user's cache folder.",
        ),
    ] = None

    reasoning_parser: Annotated[
        ReasoningParser,
        About(
            Group.READING,
            "How the model marks its thinking (docs/tools-and-reasoning.md); none reads nothing. "
            "By default found from its chat template and tokens.",
        ),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser,
        About(
            Group.READING,
            "How the model writes calls of tools; none reads nothing. By default found likewise.",
        ),
    ] = None

    allow_local_media: Annotated[
        ExistingFolder | None,
        About(Group.IMAGES, "Folder below which clients may name image files; none by default."),
    ] = None
    allow_private_media: Annotated[bool, About(Group.IMAGES, "Fetch images from private addresses, too.")] = (
        False
    )
    media_timeout: Annotated[
        float, Field(ge=0.1), About(Group.IMAGES, "Seconds that fetching one image may take.")
    ] = 10.0
    media_limit: Annotated[float, Field(ge=0.001), About(Group.IMAGES, "Largest image file, in MiB.")] = 20.0

    responses_store: Annotated[
        str,
        About(
            Group.RESPONSES,
            "Where /v1/responses keeps what later requests refer to: an SQLite file, memory, or off.",
            "PATH|memory|off",
        ),
    ] = "memory"
    responses_limit: Annotated[
        float,
        Field(ge=0.001),
        About(Group.RESPONSES, "MiB of responses kept; the least recently used go first."),
    ] = 256.0
    responses_count: Annotated[int, Field(ge=1), About(Group.RESPONSES, "Responses kept at most.")] = 10_000
    responses_days: Annotated[
        float, Field(ge=0.001), About(Group.RESPONSES, "Days since its last use that a response is kept.")
    ] = 30.0

    access_log: Annotated[
        bool, About(Group.LOGS, "Log every request, at its end, with its counts and times.")
    ] = True
    log_prompts: Annotated[
        bool, About(Group.LOGS, "Log the bodies of requests, too: they hold what users wrote.")
    ] = False
    log_format: Annotated[
        LogFormat,
        About(Group.LOGS, "How lines of the log are written; auto is pretty on a terminal, else JSON."),
    ] = LogFormat.AUTO
    metrics_alias: Annotated[
        MetricsAlias | None,
        About(Group.METRICS, "Show metrics under vLLM's names, too, for dashboards that are made for it."),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        About(
            Group.METRICS,
            "URL of an OpenTelemetry collector to send traces to, by OTLP over HTTP; also "
            "OTEL_EXPORTER_OTLP_ENDPOINT. By default none are sent.",
            "URL",
        ),
    ] = None
    log_level: Annotated[LogLevel, About(Group.LOGS, "Least severe messages to log.")] = LogLevel.WARNING
    log_file: Annotated[
        File | None,
        About(Group.LOGS, "File to log to, in place of standard error. Four older ones are kept beside it."),
    ] = None
    log_file_size: Annotated[
        Size,
        AfterValidator(_some_size),
        About(Group.LOGS, "Size at which the file becomes an older one.", "SIZE"),
    ] = "10MB"

    watchdog: Annotated[
        float,
        Field(ge=0),
        About(
            Group.SUPERVISION,
            "Seconds without any progress in a step, or of the server itself, after which the process ends "
            "itself with exit code 70, for its supervisor to start another; 0: never.",
        ),
    ] = 600.0

    @field_validator("prefix_cache_disk")
    @classmethod
    def _disk_behind_memory(cls, disk: str, info: ValidationInfo) -> str:
        size = parse_size(disk)
        if size is None:
            raise ValueError("auto is no size here.")
        if size and parse_size(info.data.get("prefix_cache_ram", "auto")) == 0:
            raise ValueError("It needs --prefix-cache-ram.")
        return disk

    @field_validator("served_model_name")
    @classmethod
    def _one_to_name(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if names and len(info.data.get("model", ())) > 1:
            raise ValueError("It goes with one --model; several are named by NAME=.")
        return names

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`read.read` asks the sources one by one, to be able to say where a value came from."""
        return (init_settings,)


def about(name: str) -> About:
    """What people are told of the setting of this name."""
    (found,) = (each for each in Configuration.model_fields[name].metadata if isinstance(each, About))
    return found


def names() -> list[str]:
    """Of all settings, group by group."""
    groups = list(Group)
    return sorted(Configuration.model_fields, key=lambda name: groups.index(about(name).group))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def is_secret(name: str) -> bool:
    """The field of this name, if there is one, holds what nobody but the operator may see."""
    field = Configuration.model_fields.get(name)
    return field is not None and _holds_secret(field.annotation)


def _holds_secret(annotation: object) -> bool:
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))
