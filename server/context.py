"""What the routes of one app share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import dataclass, field

from fastapi import Request

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.engine import Engine
from chairlift.engine.output.formats import OutputFormat
from chairlift.server.errors import CLIENT_CLOSED_REQUEST, APIError, invalid, model_not_found
from chairlift.server.logprobs import TokenTexts
from chairlift.server.media.images import ImageReader
from chairlift.server.metrics import ServerMetrics
from chairlift.server.models.leases import hold
from chairlift.server.models.model import Model, Use
from chairlift.server.models.models import Models
from chairlift.server.responses.caller import ANYBODY, Caller
from chairlift.server.responses.registry import Responses
from chairlift.server.security.gate import key_of
from chairlift.server.security.keys import Keys
from chairlift.server.settings import ServerSettings
from chairlift.server.streaming import unless_gone


@dataclass(slots=True)
class Context:
    """Lives in `app.state`; a request that is about one model has a copy that says which."""

    models: Models
    settings: ServerSettings
    metrics: ServerMetrics
    model: Model | None = None
    """The one that the request is about."""
    keys: Keys = field(init=False)
    images: ImageReader = field(init=False)
    responses: Responses = field(init=False)

    def __post_init__(self) -> None:
        self.keys = Keys(self.settings.security.keys.read())
        self.images = ImageReader(self.settings.media)
        self.responses = Responses(self.settings.responses)

    async def about(
        self,
        http: Request,
        name: str | None,
        use: Use,
        check: Callable[[Context], Awaitable[object]] | None = None,
    ) -> Context:
        """The context of a request that names this model, which stays loaded until it is answered. None: the
        one that there is for such requests.

        Args:
            check: called before the request has a model loaded, or waits for that, with the context that is
                to be; may raise.

        Raises:
            APIError: 404: there is none of this name; 503: it cannot be loaded.
            EngineStopped, QueueFull: as `Models.acquire`.
        """
        model = self.models.default(use) if name is None else self.models.find(name)
        if model is None and name is not None and self.models.default(use) is not None:
            raise model_not_found(name)
        if model is not None and model.use in (use, None):
            if model.ready and self.models.takes(model):
                hold(http.scope, await self.models.acquire(model))
            else:
                if check is not None:
                    await check(self.of(model))
                await self._wait_for(http, model)
        return self.of(model)

    def of(self, model: Model | None) -> Context:
        context = copy(self)
        context.model = model
        return context

    async def _wait_for(self, http: Request, model: Model) -> None:
        """Hold it as soon as it is loaded, unless the client leaves before that."""
        lease = await unless_gone(http, (), self.models.acquire(model))
        if lease is None:
            raise APIError(CLIENT_CLOSED_REQUEST, "The client left.")
        hold(http.scope, lease)

    @property
    def engine(self) -> Engine:
        """Raises: APIError: 400 where the model asked for generates no text, 404 where none does."""
        model = self.model or self.models.default(Use.GENERATION)
        if model is None:
            raise APIError(
                404,
                "This server has no model that generates text; it serves embeddings.",
                param="model",
                code="model_not_found",
            )
        if not isinstance(model.engine, Engine):
            raise invalid(
                f"The model {model.name!r} is served for embeddings or scores; it generates no text.",
                "model",
                "unsupported_value",
            )
        return model.engine

    def embedder(self, what: str) -> EmbeddingEngine:
        """Raises: APIError: 400 where the model asked for generates text; `what` it does not do then. 404
        where none embeds."""
        if self.model is None:
            raise APIError(
                404,
                "This server has no embedding model.",
                param="model",
                code="model_not_found",
            )
        if not isinstance(self.model.engine, EmbeddingEngine):
            raise invalid(
                f"The model {self.model.name!r} generates text; it {what}.", "model", "unsupported_value"
            )
        return self.model.engine

    def admit(self) -> None:
        """Raises: EngineStopped before a model is there and from the start of the drain on."""
        self.models.admit()

    def administer(self, request: Request) -> None:
        """Asked before a client may do what concerns all of them. Without keys everyone may.

        Raises: APIError: 403 where it takes an admin's key."""
        if not self.keys:
            return
        key = key_of(request.scope)
        if key is None or not key.admin:
            how = "" if self.keys.has_admin else "; this server has none (--admin-key-file)"
            raise APIError(
                403, f"This needs an admin's key{how}.", kind="permission_error", code="admin_key_needed"
            )

    def tenant(self, request: Request) -> str:
        """What kept prefixes of this request are salted with, before its own salt; "": all share them."""
        key = key_of(request.scope) if self.settings.security.prefix_cache_per_key else None
        return "" if key is None else f"{key.tenant}\0"

    def caller(self, request: Request) -> Caller:
        """To whom stored responses belong that the request makes, and which it reaches: those of its own key,
        and of all others where it is an admin's or there are no keys."""
        key = key_of(request.scope)
        return ANYBODY if key is None else Caller(key.tenant, everything=key.admin)

    @property
    def token_texts(self) -> TokenTexts:
        """Made at the first call, off the event loop: it tokenizes."""
        return self._generating.token_texts

    @property
    def output(self) -> OutputFormat:
        """How the model's answers are read."""
        return self._generating.output(self.settings.parsers)

    @property
    def fingerprint(self) -> str:
        return self._generating.fingerprint

    @property
    def defaults(self) -> Mapping[str, float]:
        """Parameters of the model's requests, where these name none."""
        return self._generating.spec.defaults

    @property
    def _generating(self) -> Model:
        model = self.model or self.models.default(Use.GENERATION)
        assert model is not None
        return model


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
