"""Which models there are, and how they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.errors import EngineStopped
from chairlift.server.models.model import AdoptedModel, Model, Use
from chairlift.server.models.roster import State

STOPPING = "The server is shutting down."


class Catalogue:
    """All models of a process."""

    def __init__(self, models: Iterable[Model]) -> None:
        self.started = False
        """The models that are loaded at the start are there, or cannot be."""
        self._models = list(models)
        self._stopping = False

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str) -> Model | None:
        return next((model for model in self._models if model.answers_to(name)), None)

    def default(self, use: Use) -> Model | None:
        """The one for requests of this use that name none: the first that is ready, else the first."""
        fit = [model for model in self._models if model.use in (use, None)]
        return next((model for model in fit if model.ready), fit[0] if fit else None)

    @property
    def engines(self) -> list[Engine | EmbeddingEngine]:
        """Of all that are loaded, or about to be, or still to go."""
        return [model.engine for model in self._models if model.engine is not None]

    @property
    def draining(self) -> bool:
        """Nothing is admitted any more."""
        return self._stopping or any(
            isinstance(model, AdoptedModel) and model.engine is not None and model.engine.draining
            for model in self._models
        )

    @property
    def ready(self) -> bool:
        """Requests are answered."""
        return not self.draining and (self.started or all(model.ready for model in self._models))

    @property
    def wedged(self) -> bool:
        """A thread did not come back from a call, and was given up."""
        return any(engine.wedged for engine in self.engines)

    @property
    def abandoned(self) -> bool:
        """A model was still looked for or loaded when the server stopped."""
        return self.draining and any(
            model.entry.state in (State.FINDING, State.LOADING) for model in self._models
        )

    def require_open(self) -> None:
        """Raises: EngineStopped from the start of the drain on."""
        if self.draining:
            raise EngineStopped(STOPPING)

    def admit(self) -> None:
        """Raises: EngineStopped from the start of the drain on, and before the first model is there."""
        self.require_open()
        if not self.ready and not any(model.ready for model in self._models):
            raise EngineStopped("The model is not ready yet; try again soon.")
