"""What the routes of one app share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.metadata import version

from fastapi import Request

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineStopped
from chairlift.engine.output.formats import OutputFormat, choose_format
from chairlift.engine.plan import ModelInfo
from chairlift.server.errors import APIError
from chairlift.server.logprobs import TokenTexts
from chairlift.server.media.images import ImageReader
from chairlift.server.metrics import ServerMetrics
from chairlift.server.responses.registry import Responses
from chairlift.server.settings import ServerSettings


@dataclass(slots=True)
class Context:
    """Lives in `app.state`."""

    generation: Engine | None
    """None: only embeddings are served."""
    settings: ServerSettings
    metrics: ServerMetrics
    embedder: EmbeddingEngine | None = None
    images: ImageReader = field(init=False)
    responses: Responses = field(init=False)
    _token_texts: TokenTexts | None = field(default=None, init=False)
    _output: OutputFormat | None = field(default=None, init=False)
    _fingerprint: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.images = ImageReader(self.settings.media)
        self.responses = Responses(self.settings.responses)

    @property
    def engine(self) -> Engine:
        """Raises: APIError 404 where no model generates text."""
        if self.generation is None:
            raise APIError(
                404,
                "This server has no model that generates text; it serves embeddings.",
                param="model",
                code="model_not_found",
            )
        return self.generation

    @property
    def engines(self) -> list[Engine | EmbeddingEngine]:
        return [engine for engine in (self.generation, self.embedder) if engine is not None]

    def admit(self) -> None:
        """Raises: EngineStopped before all models are loaded and from the start of the drain on."""
        if any(engine.draining for engine in self.engines):
            raise EngineStopped("The server is shutting down.")
        if not all(engine.ready for engine in self.engines):
            raise EngineStopped("The model is not ready yet; try again soon.")

    def administer(self, request: Request) -> None:
        """Asked before a client may do what concerns all of them. There are no keys: everyone may."""

    @property
    def token_texts(self) -> TokenTexts:
        """Made at the first call, off the event loop: it tokenizes. Made twice in a race, one is dropped."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.engine.tokenizer)
        return self._token_texts

    @property
    def output(self) -> OutputFormat:
        """How the model's answers are read."""
        if self._output is None:
            parsers = self.settings.parsers
            self._output = choose_format(
                self.engine.tokenizer, reasoning=parsers.reasoning, tool_call=parsers.tool_call
            )
        return self._output

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.engine.info)
        return self._fingerprint


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


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
