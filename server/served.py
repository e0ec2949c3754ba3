"""What the operator asks to be served, and what is told of it once it is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.engine.embedding.types import EmbeddingModelInfo, Task
from chairlift.engine.engine import EngineConfig
from chairlift.engine.plan import ModelInfo, RunnerStats
from chairlift.server.models.model import Use
from chairlift.server.settings import ParserSettings, ServerSettings


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """One model that is to be served."""

    model: str | None = None
    """A folder, a GGUF file or a name on the hub; None is the embedded default."""
    name: str | None = None
    """What clients write in `model`; None is the folder's or the repository's name."""
    aliases: tuple[str, ...] = ()
    """What clients may write instead."""
    use: Use | None = None
    """None: as its files say."""
    dtype: str | None = None
    """Number format of the weights; None leaves it to the device."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None is the model's own context."""
    kv_cache_dtype: str = "auto"
    """Type that keys and values are kept in: the model's own, int8 or int4."""
    chat_template: Path | None = None
    """A file of Jinja in place of the model's own template."""
    pooling: str | None = None
    """How an embedding model makes one vector of a text's tokens; None is what the folder says."""
    parsers: ParserSettings | None = None
    """How its answers are read; None: as all are."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Parameters of requests, where these name none."""
    at_start: bool = True
    """False: loaded when a request asks for it."""
    pinned: bool = False
    """Never unloaded."""
    idle_unload_s: float | None = None
    """Seconds without a request after which it is unloaded; None: never."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    models: tuple[ModelOptions, ...] = (ModelOptions(),)
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    drain_timeout: float = 30.0
    """Seconds that running answers get to finish after a signal to stop."""
    memory_limit_bytes: int | None = None
    """Of all models together; None is what suits the device, 0 no bound."""
    load_timeout: float = 300.0
    """Seconds that a request waits for its model to be loaded."""
    watchdog_s: float = 600.0
    """Seconds without any progress after which the process ends itself, for its supervisor to start another;
    0: never."""
    settings: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served and where, for whoever tells the operator."""

    url: str
    info: ModelInfo
    memory: RunnerStats
    config: EngineConfig
    has_chat_template: bool
    credentials: str = ""
    """What a shell command needs besides, to be let in."""
    longest: int | None = None
    """Tokens of prompt and answer that memory lets a request have; None: as many as the context."""

    @property
    def curl(self) -> str:
        """A shell command that works as it stands, and gets a short answer of the most probable tokens: small
        models ramble at the default temperature."""
        question = "What is the capital of France?"
        body: dict[str, object] = {"model": self.info.name, "temperature": 0}
        if self.has_chat_template:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": question}]
        else:
            path, body["prompt"] = "/v1/completions", question
        body["max_tokens"] = 100
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl {self.url}{path}{self.credentials} -H 'Content-Type: application/json' -d {data}"


@dataclass(frozen=True, slots=True)
class EmbeddingServing:
    """An embedding model that is served, beside another or alone."""

    url: str
    info: EmbeddingModelInfo
    credentials: str = ""

    @property
    def curl(self) -> str:
        """A shell command that works as it stands."""
        body: dict[str, object] = {"model": self.info.name}
        if self.info.task is Task.EMBED:
            path, body["input"] = "/v1/embeddings", "Up we go."
        else:
            path, body["query"], body["documents"] = "/v1/rerank", "winter sports", ["skiing", "cooking"]
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl {self.url}{path}{self.credentials} -H 'Content-Type: application/json' -d {data}"


@dataclass(frozen=True, slots=True)
class Standby:
    """Models that are loaded when a request asks for them."""

    url: str
    names: tuple[str, ...]
