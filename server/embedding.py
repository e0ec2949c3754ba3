"""From the body of a request for vectors or scores to tokens, once: nothing downstream checks again.

Plain functions, fit to run on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import EmbeddingModelInfo, Task, TokenizedText
from chairlift.engine.errors import ContextLengthExceeded
from chairlift.server.body import parse
from chairlift.server.context import Context
from chairlift.server.errors import APIError, invalid, model_not_found, shorten
from chairlift.server.validation import MOST_CHARACTERS
from chairlift.server.wire.embeddings import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    DocumentText,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)

MOST_TEXTS = 2048
"""In one request: OpenAI's bound on inputs."""


@dataclass(frozen=True, slots=True)
class PreparedEmbeddings:
    embedder: EmbeddingEngine
    texts: tuple[TokenizedText, ...]
    dimensions: int | None
    base64: bool


@dataclass(frozen=True, slots=True)
class PreparedPairs:
    """Pairs to be scored. An embedding model gets the texts of both sides one after the other, a
    cross-encoder each pair as one."""

    embedder: EmbeddingEngine
    texts: tuple[TokenizedText, ...]
    left: int
    """How many of `texts` are of the left side; 0: they are pairs."""


def prepare_embeddings(raw: bytes, context: Context) -> PreparedEmbeddings:
    """Raises: APIError with 4xx."""
    wire = parse(raw, EmbeddingRequest, EMBEDDINGS, context.settings.max_json_depth)
    embedder = _embedder(context, wire.model, "makes no embeddings")
    info = embedder.info
    if info.task is not Task.EMBED:
        raise invalid(
            f"The model {info.name!r} scores pairs and makes no embeddings; use /v1/rerank or /v1/score.",
            "model",
            "unsupported_value",
        )
    if wire.dimensions is not None and not 1 <= wire.dimensions <= info.dimensions:
        raise invalid(
            f"dimensions must be from 1 to {info.dimensions}, not {wire.dimensions}.",
            "dimensions",
            "invalid_value",
        )
    reader = _Reader(
        embedder, _limit(wire.truncate_prompt_tokens, info), wire.add_special_tokens is not False
    )
    return PreparedEmbeddings(
        embedder, _inputs(wire, reader), wire.dimensions, wire.encoding_format == "base64"
    )


def prepare_rerank(raw: bytes, context: Context) -> tuple[RerankRequest, list[str], PreparedPairs]:
    """The request, the texts of its documents, and the pairs of the query with each.

    Raises: APIError with 4xx.
    """
    wire = parse(raw, RerankRequest, RERANK, context.settings.max_json_depth)
    if wire.top_n is not None and wire.top_n < 0:
        raise invalid(f"top_n must be at least 0, not {wire.top_n}.", "top_n", "invalid_value")
    documents = [item.text if isinstance(item, DocumentText) else item for item in wire.documents]
    embedder = _embedder(context, wire.model, "ranks nothing")
    pairs = _pairs(
        embedder,
        [wire.query],
        documents,
        wire.truncate_prompt_tokens,
        ("query", None),
        ("documents", "documents[{}]"),
    )
    return wire, documents, pairs


def prepare_score(raw: bytes, context: Context) -> PreparedPairs:
    """Raises: APIError with 4xx."""
    wire = parse(raw, ScoreRequest, SCORE, context.settings.max_json_depth)
    embedder = _embedder(context, wire.model, "scores nothing")
    sides = [wire.text_1, wire.text_2]
    left, right = ([side] if isinstance(side, str) else side for side in sides)
    params = [
        (name, None if isinstance(side, str) else name + "[{}]")
        for name, side in zip(("text_1", "text_2"), sides, strict=True)
    ]
    if left and len(left) not in (1, len(right)):
        raise invalid(
            f"text_1 must hold one text or as many as text_2 ({len(right)}), not {len(left)}.",
            "text_1",
            "invalid_value",
        )
    return _pairs(embedder, left, right, wire.truncate_prompt_tokens, params[0], params[1])


def _embedder(context: Context, name: str, what: str) -> EmbeddingEngine:
    """Raises: APIError: 404 for a model that is not served, 400 for the one that generates text."""
    embedder, generation = context.embedder, context.generation
    if embedder is not None and name == embedder.info.name:
        return embedder
    if generation is not None and name == generation.info.name:
        raise invalid(f"The model {shorten(name)!r} generates text; it {what}.", "model", "unsupported_value")
    raise model_not_found(name)


Param = tuple[str, str | None]
"""A parameter, and the form of a place in it where it is a list."""


def _pairs(
    embedder: EmbeddingEngine,
    left: Sequence[str],
    right: Sequence[str],
    truncate: int | None,
    left_param: Param,
    right_param: Param,
) -> PreparedPairs:
    """Pairs of `left`, which may be one text for all, and `right`."""
    for side, (param, _) in ((left, left_param), (right, right_param)):
        _check_count(len(side), param)
    reader = _Reader(embedder, _limit(truncate, embedder.info), True)
    left_places, right_places = _places(left, left_param), _places(right, right_param)
    for text, place in zip((*left, *right), (*left_places, *right_places), strict=True):
        _check_text(text, place)
    if embedder.info.task is Task.SCORE:
        repeated = left if len(left) == len(right) else [left[0]] * len(right)
        return PreparedPairs(
            embedder,
            tuple(
                reader.pair(first, second, place)
                for first, second, place in zip(repeated, right, right_places, strict=True)
            ),
            0,
        )
    texts = [reader.text(text, place) for text, place in zip(left, left_places, strict=True)]
    texts += [reader.text(text, place) for text, place in zip(right, right_places, strict=True)]
    return PreparedPairs(embedder, tuple(texts), len(left))


def _places(texts: Sequence[str], param: Param) -> list[str]:
    name, form = param
    return [name if form is None else form.format(index) for index in range(len(texts))]


def _limit(truncate: int | None, info: EmbeddingModelInfo) -> int | None:
    """Tokens to cut to; None: what is longer than the model's context is refused."""
    if truncate is None:
        return None
    if truncate == -1:
        return info.context_length
    if not 1 <= truncate <= info.context_length:
        raise invalid(
            f"truncate_prompt_tokens must be -1 or from 1 to {info.context_length}, not {truncate}.",
            "truncate_prompt_tokens",
            "invalid_value",
        )
    return truncate


def _check_count(count: int, param: str) -> None:
    if not 1 <= count <= MOST_TEXTS:
        raise invalid(f"{param} must hold 1 to {MOST_TEXTS} texts, not {count}.", param, "invalid_value")


def _check_text(text: str, place: str) -> None:
    if not text:
        raise invalid(f"{place} is an empty string.", place, "invalid_value")


def _inputs(wire: EmbeddingRequest, reader: _Reader) -> tuple[TokenizedText, ...]:
    given = wire.input
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    items: Sequence[object] = given if isinstance(given, list) and several else [given]
    _check_count(len(items), "input")
    texts: list[TokenizedText] = []
    for index, item in enumerate(items):
        place = f"input[{index}]" if several else "input"
        if isinstance(item, str):
            _check_text(item, place)
            texts.append(reader.text(item, place))
        else:
            assert isinstance(item, list)
            texts.append(reader.tokens(item, place))
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Texts to tokens, within the model's context."""

    embedder: EmbeddingEngine
    limit: int | None
    """Tokens that longer texts are cut to."""
    add_special_tokens: bool

    def text(self, text: str, place: str) -> TokenizedText:
        return self._encode(self._cut(text, place), None, place)

    def pair(self, first: str, second: str, place: str) -> TokenizedText:
        return self._encode(self._cut(first, place), self._cut(second, place), place)

    def tokens(self, token_ids: list[int], place: str) -> TokenizedText:
        """As they are: no special token is added."""
        if not token_ids:
            raise invalid(f"{place} is empty: it must hold at least one token.", place, "invalid_value")
        cut = tuple(token_ids[: self.limit])
        self._check_room(len(cut), "tokens", place)
        known = self.embedder.info.vocab_size
        for index, token in enumerate(cut):
            if not 0 <= token < known:
                where = f"{place}[{index}]"
                raise invalid(
                    f"{where} is {token}, which is not a token of this model (0 to {known - 1}).",
                    where,
                    "invalid_value",
                )
        return TokenizedText(cut)

    def _encode(self, text: str, pair: str | None, place: str) -> TokenizedText:
        try:
            tokenized = self.embedder.tokenizer.encode(
                text, pair, add_special_tokens=self.add_special_tokens, limit=self.limit
            )
        except ContextLengthExceeded as error:
            raise invalid(error.message, error.param, "invalid_value") from None
        if not len(tokenized):
            raise invalid(f"{place} makes no token.", place, "invalid_value")
        self._check_room(len(tokenized), "tokens", place)
        return tokenized

    def _cut(self, text: str, place: str) -> str:
        """What is far too long is not tokenized."""
        if self.limit is None:
            self._check_room(-(-len(text) // MOST_CHARACTERS), "tokens at least", place)
            return text
        return text[: self.limit * MOST_CHARACTERS]

    def _check_room(self, size: int, unit: str, place: str) -> None:
        most = self.embedder.info.context_length
        if size > most:
            raise _too_long(f"{place} has {size} {unit}; this model takes {most}, no more.", place)


def _too_long(message: str, place: str) -> APIError:
    return invalid(message, place, "context_length_exceeded")
