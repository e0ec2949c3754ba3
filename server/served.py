"""What the operator asks to be served, and what is told of it once it is."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.engine.embedding.types import EmbeddingModelInfo, Task
from chairlift.engine.engine import EngineConfig
from chairlift.engine.plan import ModelInfo, RunnerStats
from chairlift.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ServeOptions:
    model: str | None = None
    """A folder, a GGUF file or a name on the hub; None is the embedded default."""
    served_name: str | None = None
    """What clients write in `model`; None is the folder's or the repository's name."""
    dtype: str | None = None
    """Number format of the weights; None leaves it to the device."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None is the model's own context."""
    kv_cache_dtype: str = "auto"
    """Type that keys and values are kept in: the model's own, int8 or int4."""
    chat_template: Path | None = None
    """A file of Jinja in place of the model's own template."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    drain_timeout: float = 30.0
    """Seconds that running answers get to finish after a signal to stop."""
    access_log: bool = False
    embedding_model: str | None = None
    """A folder or a name on the hub. Given without `model`, it is served alone."""
    served_embedding_name: str | None = None
    embedding_pooling: str | None = None
    """How one vector is made of a text's tokens; None is what the folder says."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served and where, for whoever tells the operator."""

    url: str
    info: ModelInfo
    memory: RunnerStats
    config: EngineConfig
    has_chat_template: bool

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
        return f"curl {self.url}{path} -H 'Content-Type: application/json' -d {data}"


@dataclass(frozen=True, slots=True)
class EmbeddingServing:
    """An embedding model that is served, beside another or alone."""

    url: str
    info: EmbeddingModelInfo

    @property
    def curl(self) -> str:
        """A shell command that works as it stands."""
        body: dict[str, object] = {"model": self.info.name}
        if self.info.task is Task.EMBED:
            path, body["input"] = "/v1/embeddings", "Up we go."
        else:
            path, body["query"], body["documents"] = "/v1/rerank", "winter sports", ["skiing", "cooking"]
        data = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl {self.url}{path} -H 'Content-Type: application/json' -d {data}"
