"""A table `[[models]]` of a configuration file: one model, and what is different about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from chairlift.server.configuration.about import ReasoningParser, ToolCallParser
from chairlift.server.configuration.types import (
    ExistingFile,
    FloatType,
    KVType,
    LoadTime,
    PoolingType,
    Several,
    Size,
)
from chairlift.server.models.model import Use


def split_name(text: str) -> tuple[str, str]:
    """`NAME=` of a --model, or "", and the model. A path that exists is one, whatever it holds."""
    name, equals, model = text.partition("=")
    if equals and name and model and not Path(text).expanduser().exists():
        return name + equals, model
    return "", text


class Defaults(BaseModel):
    """Parameters of requests, where these name none. Ranges are those of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None


class ModelTable(BaseModel):
    """What is left out is as the settings of the same name say, or as told here."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Annotated[
        str | None,
        Field(description="A folder, a GGUF file, or org/name on the hub. Left out, the embedded model."),
    ] = None
    name: Annotated[
        str | None, Field(description="What clients call it; the folder's or repository's name by default.")
    ] = None
    aliases: Annotated[Several, Field(description="Other names that requests may give.")] = ()
    use: Annotated[Use | None, Field(description="What it is for, where its files do not tell.")] = None
    load: Annotated[LoadTime | None, Field(description="At the start, or when a request asks for it.")] = None
    pin: Annotated[
        bool, Field(description="It is never unloaded: not when idle, not for another, not by an operator.")
    ] = False
    idle_unload: Annotated[
        float | None,
        Field(ge=0, description="Seconds without a request after which it is unloaded; 0: never."),
    ] = None
    defaults: Annotated[
        Defaults,
        Field(description="Parameters of requests, where these name none, as `{ temperature = 0.6 }`."),
    ] = Defaults()
    dtype: Annotated[FloatType | None, Field(description="Type of the weights.")] = None
    max_model_len: Annotated[int | None, Field(ge=1, description="Tokens of prompt and answer together.")] = (
        None
    )
    kv_cache_dtype: Annotated[KVType | None, Field(description="Type that keys and values are kept in.")] = (
        None
    )
    chat_template: Annotated[
        ExistingFile | None, Field(description="A file with the chat template to use in place of its own.")
    ] = None
    reasoning_parser: Annotated[ReasoningParser, Field(description="How it marks its thinking.")] = None
    tool_call_parser: Annotated[ToolCallParser, Field(description="How it writes calls of tools.")] = None
    pooling: Annotated[
        PoolingType | None, Field(description="How an embedding model makes one vector of a text's tokens.")
    ] = None
    max_num_seqs: Annotated[int | None, Field(ge=1, description="Requests answered at once.")] = None
    max_waiting: Annotated[int | None, Field(ge=0, description="Requests that may wait for a place.")] = None
    max_num_batched_tokens: Annotated[
        int | None, Field(ge=1, description="Tokens a step computes at most.")
    ] = None
    max_step_ms: Annotated[
        float | None, Field(ge=1, description="Milliseconds that a step may take while answers run.")
    ] = None
    prefix_cache_ram: Annotated[
        Size | None, Field(description="Memory for prefixes of its earlier requests.")
    ] = None
