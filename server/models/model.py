"""One model, as requests see it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import EmbeddingModelInfo
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineError
from chairlift.engine.memory.budget import Budget, Reservation
from chairlift.engine.output.formats import OutputFormat, choose_format
from chairlift.engine.plan import ModelInfo
from chairlift.server.logprobs import TokenTexts
from chairlift.server.models.roster import Entry, State
from chairlift.server.settings import ParserSettings


class Use(StrEnum):
    """What a model is for."""

    GENERATION = "generation"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class Found:
    """A model whose files are there.

    Attributes:
        size: bytes that loading it takes.
        make: an engine that is not started yet, given the budget and what is reserved of it for the load.
    """

    use: Use
    size: int
    make: Callable[[Budget | None, Reservation | None], Engine | EmbeddingEngine]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that is to be served.

    Attributes:
        name: as clients spell it.
        find: looks for its files, or fetches them; blocks, on any thread. Raises: ModelUnavailable.
        aliases: other spellings.
        use: None where that is not known before its files are found.
        context_length: tokens; None likewise.
        at_start: loaded when the server starts; others when they are asked for.
        pinned: never unloaded.
        idle_unload_s: seconds without a request after which it is unloaded.
        parsers: how its answers are read; None: as all are.
        defaults: parameters of requests, where these name none.
        created: Unix seconds.
        found: what `find` gave already.
    """

    name: str
    find: Callable[[], Found]
    aliases: tuple[str, ...] = ()
    use: Use | None = None
    context_length: int | None = None
    at_start: bool = True
    pinned: bool = False
    idle_unload_s: float | None = None
    parsers: ParserSettings | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = 0
    found: Found | None = None

    def entry(self) -> Entry:
        """For a roster."""
        return Entry(self.name, pinned=self.pinned, idle_unload_s=self.idle_unload_s)


class Model:
    """A model and, while it is loaded, its engine."""

    def __init__(self, spec: ModelSpec, entry: Entry) -> None:
        self.spec = spec
        self.entry = entry
        self.found = spec.found
        self.engine: Engine | EmbeddingEngine | None = None
        """From the beginning of a load to the end of an unload."""
        self._info: ModelInfo | EmbeddingModelInfo | None = None
        self.held = 0
        """Bytes that it took when it was loaded last."""
        self.loads = self.failures = 0
        """How often it was loaded, and could not be."""
        self.load_seconds = 0.0
        """That its loads took."""
        self.fault: EngineError | None = None
        """What a load failed with last, in full; None also where the roster refused it."""
        self._use = spec.use
        self._token_texts: TokenTexts | None = None
        self._output: OutputFormat | None = None
        self._fingerprint: str | None = None

    @property
    def name(self) -> str:
        """As its engine spells it, once there is one."""
        return self.info.name if self.info is not None else self.spec.name

    @property
    def state(self) -> State:
        return self.entry.shown

    @property
    def info(self) -> ModelInfo | EmbeddingModelInfo | None:
        """Kept from the last time that it was loaded; None before the first."""
        if self.engine is not None and self.engine.ready:
            self._info = self.engine.info
        return self._info

    @property
    def use(self) -> Use | None:
        """None before its files were found, where they had to be."""
        if self._use is None:
            if self.engine is not None:
                self._use = Use.GENERATION if isinstance(self.engine, Engine) else Use.EMBEDDING
            elif self.found is not None:
                self._use = self.found.use
        return self._use

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.ready

    @property
    def busy(self) -> bool:
        """It computes, or has something to."""
        if self.engine is None:
            return False
        stats = self.engine.stats()
        return bool(stats.running or stats.waiting)

    def answers_to(self, name: str) -> bool:
        return name == self.name or name in self.spec.aliases

    def begin(self, engine: Engine | EmbeddingEngine) -> None:
        """From now on it is served by this engine."""
        self.engine = engine
        self._token_texts = self._output = self._fingerprint = None

    def end(self) -> None:
        """Its engine is gone."""
        self.found = None
        self.engine = self._token_texts = self._output = None

    def generation(self) -> Engine:
        assert isinstance(self.engine, Engine)
        return self.engine

    @property
    def token_texts(self) -> TokenTexts:
        """Made at the first call, off the event loop: it tokenizes. Made twice in a race, one is dropped."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.generation().tokenizer)
        return self._token_texts

    def output(self, otherwise: ParserSettings) -> OutputFormat:
        """How the model's answers are read."""
        if self._output is None:
            parsers = self.spec.parsers or otherwise
            self._output = choose_format(
                self.generation().tokenizer, reasoning=parsers.reasoning, tool_call=parsers.tool_call
            )
        return self._output

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.generation().info)
        return self._fingerprint


class AdoptedModel(Model):
    """A model whose engine is somebody else's: there from the beginning, maybe not ready yet."""

    def __init__(self, spec: ModelSpec, entry: Entry, engine: Engine | EmbeddingEngine) -> None:
        super().__init__(spec, entry)
        self.begin(engine)
        entry.state = State.LOADED

    @property
    def state(self) -> State:
        return State.LOADED if self.ready else State.LOADING


def fingerprint(info: ModelInfo) -> str:
    """Changes with whatever may change a seeded answer: model, number format, device, version."""
    parts = (
        version("chairlift"),
        info.name,
        info.architecture,
        info.dtype,
        info.device,
        str(info.parameters),
    )
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
