"""From the body of a request for vectors or scores to tokens, once: nothing downstream checks again.

`read_…` is what takes no model, and is asked before one is loaded, too. Plain functions, fit to run on any
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import Task, TokenizedText
from chairlift.engine.errors import ContextLengthExceeded
from chairlift.server.body import parse
from chairlift.server.context import Context
from chairlift.server.errors import APIError, invalid
from chairlift.server.sampling import check_vocabulary
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


def read_embeddings(raw: bytes, context: Context) -> EmbeddingRequest:
    """Raises: APIError with 4xx."""
    wire = parse(raw, EmbeddingRequest, EMBEDDINGS, context.settings.max_json_depth)
    if wire.dimensions is not None and wire.dimensions < 1:
        raise invalid(f"dimensions must be at least 1, not {wire.dimensions}.", "dimensions", "invalid_value")
    _check_truncation(wire.truncate_prompt_tokens)
    items = _items(wire)
    _check_count(len(items), "input")
    for place, item in items:
        if isinstance(item, str):
            _check_text(item, place)
        elif not item:
            raise invalid(f"{place} is empty: it must hold at least one token.", place, "invalid_value")
        else:
            check_vocabulary(tuple(item), None, place)
    return wire


def prepare_embeddings(raw: bytes, context: Context) -> PreparedEmbeddings:
    """Raises: APIError with 4xx."""
    wire = read_embeddings(raw, context)
    embedder = context.embedder("makes no embeddings")
    info = embedder.info
    if info.task is not Task.EMBED:
        raise invalid(
            f"The model {info.name!r} scores pairs and makes no embeddings; use /v1/rerank or /v1/score.",
            "model",
            "unsupported_value",
        )
    if wire.dimensions is not None and wire.dimensions > info.dimensions:
        raise invalid(
            f"dimensions must be from 1 to {info.dimensions}, not {wire.dimensions}.",
            "dimensions",
            "invalid_value",
        )
    limit = _limit(wire.truncate_prompt_tokens, embedder)
    reader = _Reader(embedder, limit, wire.add_special_tokens is not False)
    texts = tuple(
        reader.text(item, place) if isinstance(item, str) else reader.tokens(item, place)
        for place, item in _items(wire)
    )
    return PreparedEmbeddings(embedder, texts, wire.dimensions, wire.encoding_format == "base64")


def read_rerank(raw: bytes, context: Context) -> tuple[RerankRequest, Sides]:
    """The request, its query and the texts of its documents. Raises: APIError with 4xx."""
    wire = parse(raw, RerankRequest, RERANK, context.settings.max_json_depth)
    if wire.top_n is not None and wire.top_n < 0:
        raise invalid(f"top_n must be at least 0, not {wire.top_n}.", "top_n", "invalid_value")
    documents = [item.text if isinstance(item, DocumentText) else item for item in wire.documents]
    sides = Sides([wire.query], documents, ("query", None), ("documents", "documents[{}]"))
    _check_sides(sides, wire.truncate_prompt_tokens)
    return wire, sides


def prepare_rerank(raw: bytes, context: Context) -> tuple[RerankRequest, Sequence[str], PreparedPairs]:
    """The request, the texts of its documents, and the pairs of the query with each.

    Raises: APIError with 4xx.
    """
    wire, sides = read_rerank(raw, context)
    return wire, sides.right, _pairs(context.embedder("ranks nothing"), sides, wire.truncate_prompt_tokens)


def read_score(raw: bytes, context: Context) -> tuple[ScoreRequest, Sides]:
    """Raises: APIError with 4xx."""
    wire = parse(raw, ScoreRequest, SCORE, context.settings.max_json_depth)
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
    found = Sides(left, right, params[0], params[1])
    _check_sides(found, wire.truncate_prompt_tokens)
    return wire, found


def prepare_score(raw: bytes, context: Context) -> PreparedPairs:
    """Raises: APIError with 4xx."""
    wire, sides = read_score(raw, context)
    return _pairs(context.embedder("scores nothing"), sides, wire.truncate_prompt_tokens)


Param = tuple[str, str | None]
"""A parameter, and the form of a place in it where it is a list."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The texts of pairs. `left` may be one text for all of `right`."""

    left: Sequence[str]
    right: Sequence[str]
    left_param: Param
    right_param: Param

    @property
    def places(self) -> tuple[list[str], list[str]]:
        return _places(self.left, self.left_param), _places(self.right, self.right_param)


def _check_sides(sides: Sides, truncate: int | None) -> None:
    for side, (param, _) in ((sides.left, sides.left_param), (sides.right, sides.right_param)):
        _check_count(len(side), param)
    _check_truncation(truncate)
    left, right = sides.places
    for text, place in zip((*sides.left, *sides.right), (*left, *right), strict=True):
        _check_text(text, place)


def _pairs(embedder: EmbeddingEngine, sides: Sides, truncate: int | None) -> PreparedPairs:
    reader = _Reader(embedder, _limit(truncate, embedder), True)
    left, right = sides.left, sides.right
    left_places, right_places = sides.places
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


def _limit(truncate: int | None, embedder: EmbeddingEngine) -> int | None:
    """Tokens to cut to; None: what is longer than the model's context, or than memory holds, is refused."""
    info = embedder.info
    if truncate is None:
        return None
    if truncate == -1:
        return embedder.longest
    if truncate > info.context_length:
        raise invalid(
            f"truncate_prompt_tokens must be -1 or from 1 to {info.context_length}, not {truncate}.",
            "truncate_prompt_tokens",
            "invalid_value",
        )
    return truncate


def _check_truncation(truncate: int | None) -> None:
    if truncate is not None and truncate < 1 and truncate != -1:
        raise invalid(
            f"truncate_prompt_tokens must be -1 or at least 1, not {truncate}.",
            "truncate_prompt_tokens",
            "invalid_value",
        )


def _check_count(count: int, param: str) -> None:
    if not 1 <= count <= MOST_TEXTS:
        raise invalid(f"{param} must hold 1 to {MOST_TEXTS} texts, not {count}.", param, "invalid_value")


def _check_text(text: str, place: str) -> None:
    if not text:
        raise invalid(f"{place} is an empty string.", place, "invalid_value")


def _items(wire: EmbeddingRequest) -> list[tuple[str, str | list[int]]]:
    """Texts or tokens, and the place of each."""
    given = wire.input
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    items: Sequence[object] = given if isinstance(given, list) and several else [given]
    found: list[tuple[str, str | list[int]]] = []
    for index, item in enumerate(items):
        assert isinstance(item, str | list)
        found.append((f"input[{index}]" if several else "input", item))
    return found


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
        cut = tuple(token_ids[: self.limit])
        self._check_room(len(cut), "tokens", place)
        known = self.embedder.info.vocab_size
        for index, token in enumerate(cut):
            if token >= known:
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
        most, context = self.embedder.longest, self.embedder.info.context_length
        if size > most:
            who = "this model takes" if most == context else "this server has memory for"
            raise _too_long(f"{place} has {size} {unit}; {who} {most}, no more.", place)


def _too_long(message: str, place: str) -> APIError:
    return invalid(message, place, "context_length_exceeded")
