"""Every endpoint, as the description of the API has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel

from chairlift.server.openapi import answers, items
from chairlift.server.wire.cache import WARM, WarmRequest
from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.embeddings import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from chairlift.server.wire.messages import CountTokensRequest, MessagesRequest
from chairlift.server.wire.models import (
    OPERATE,
    AnthropicModelCard,
    AnthropicModelList,
    LoadRequest,
    ModelCard,
    ModelList,
    UnloadRequest,
)
from chairlift.server.wire.parameters import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
    Surface,
)
from chairlift.server.wire.responses import Includable, ResponsesRequest
from chairlift.server.wire.tokenize import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest

BODY = (400, 404, 408, 413, 415, 500, 503)
"""Refusals of an endpoint that reads a body and finds a model."""
ANSWER = (*BODY, 429)


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    schema: dict[str, object]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    answers: tuple[type[BaseModel], ...] = ()
    """Of status 200."""
    body: type[BaseModel] | None = None
    surface: Surface | None = None
    errors: tuple[int, ...] = ()
    stream: str | None = None
    """What comes as server-sent events, if they are asked for."""
    events: tuple[type[BaseModel], ...] = ()
    """Their data."""
    anthropic: bool = False
    """Errors have Anthropic's form."""
    query: tuple[Query, ...] = ()
    text: str | None = None
    """Media type of an answer that is no JSON."""
    unready: type[BaseModel] | None = None
    """What a 503 holds in place of an error alone."""


_DONE = (
    "Chunks as `data`, ended by `[DONE]`; a failure is an event of the name `error`, and no `[DONE]` follows."
)
_PAGING = "With the header `anthropic-version` only."
_INCLUDE = Query("include", {"type": "array", "items": {"enum": list(get_args(Includable))}})


def _scoring(path: str) -> Operation:
    return Operation(
        "post", path, "Score texts", (answers.ScoreList,), ScoreRequest, SCORE, ANSWER
    )  # fmt: skip


def _ranking(path: str) -> Operation:
    return Operation(
        "post", path, "Rank documents", (answers.Ranking,), RerankRequest, RERANK, ANSWER
    )  # fmt: skip


OPERATIONS = (
    Operation(
        "get",
        "/v1/models",
        "List the models",
        (ModelList, AnthropicModelList),
        errors=(400, 500, 503),
        query=(
            Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, _PAGING),
            Query("after_id", {"type": "string"}, _PAGING),
            Query("before_id", {"type": "string"}, _PAGING),
            Query("client_version", {"type": "string"}, "Which Codex sends; has no effect."),
        ),
    ),
    Operation(
        "get",
        "/v1/models/{model_id}",
        "Tell of a model",
        (ModelCard, AnthropicModelCard),
        errors=(400, 404, 500, 503),
    ),
    Operation("post", "/v1/models/load", "Load a model", (ModelCard,), LoadRequest, OPERATE, ANSWER),
    Operation(
        "post", "/v1/models/unload", "Unload a model", (ModelCard,), UnloadRequest, OPERATE, (*BODY, 409)
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        (answers.ChatCompletion,),
        ChatRequest,
        CHAT,
        ANSWER,
        _DONE,
        (answers.ChatChunk, answers.Error),
    ),
    Operation(
        "post",
        "/v1/completions",
        "Go on with texts",
        (answers.Completion,),
        CompletionRequest,
        COMPLETIONS,
        ANSWER,
        _DONE,
        (answers.Completion, answers.Error),
    ),
    Operation(
        "post",
        "/v1/responses",
        "Create a response",
        (items.ResponseObject,),
        ResponsesRequest,
        RESPONSES,
        ANSWER,
        "Events named by their `type`, from `response.created` to `response.completed`, `.incomplete` or "
        "`.failed`; each has a `sequence_number`.",
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a prompt",
        (items.InputTokenCount,),
        ResponsesRequest,
        INPUT_TOKENS,
        BODY,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "Retrieve a response",
        (items.ResponseObject,),
        errors=(400, 404, 500, 503),
        stream="The events of a response that was created with `background` and `stream`.",
        query=(
            Query("stream", {"type": "boolean"}),
            Query("starting_after", {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}),
            _INCLUDE,
            Query("include_obfuscation", {"type": "boolean"}),
        ),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Delete a response",
        (items.Deleted,),
        errors=(400, 404, 500, 503),
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a response in the background",
        (items.ResponseObject,),
        errors=(400, 404, 500, 503),
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "List what a response was asked",
        (items.InputItems,),
        errors=(400, 404, 500, 503),
        query=(
            Query("after", {"type": "string"}),
            _INCLUDE,
            Query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            Query("order", {"enum": ["asc", "desc"]}),
        ),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's form",
        (items.AnthropicMessage,),
        MessagesRequest,
        MESSAGES,
        (*(status for status in ANSWER if status != 503), 529),
        "Events named by their `type`, from `message_start` to `message_stop`; a failure is an `error` "
        "event, and no `message_stop` follows.",
        anthropic=True,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a prompt",
        (items.TokenCount,),
        CountTokensRequest,
        COUNT_TOKENS,
        (*(status for status in BODY if status != 503), 529),
        anthropic=True,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Embed texts",
        (answers.EmbeddingList,),
        EmbeddingRequest,
        EMBEDDINGS,
        ANSWER,
    ),
    *map(_ranking, ("/v1/rerank", "/v2/rerank", "/rerank")),
    *map(_scoring, ("/v1/score", "/score")),
    Operation(
        "post",
        "/tokenize",
        "Tokens of a text or of messages",
        (answers.Tokens,),
        TokenizeRequest,
        TOKENIZE,
        BODY,
    ),
    Operation(
        "post", "/detokenize", "Text of tokens", (answers.Detokenized,), DetokenizeRequest, DETOKENIZE, BODY
    ),
    Operation(
        "delete",
        "/v1/cache",
        "Keep nothing of earlier requests",
        (answers.CacheCleared,),
        errors=(400, 404, 500, 503),
        query=(Query("model", {"type": "string"}, "By default all."), Query("disk", {"type": "boolean"})),
    ),
    Operation(
        "post",
        "/v1/cache/warm",
        "Compute and keep what prompts begin with",
        (answers.CacheWarmed,),
        WarmRequest,
        WARM,
        ANSWER,
    ),
    Operation(
        "get",
        "/health",
        "Tell whether the process lives",
        (answers.Health,),
        errors=(400,),
        unready=answers.Health,
    ),
    Operation(
        "get",
        "/health/ready",
        "Tell whether requests are answered",
        (answers.Ready,),
        errors=(400,),
        unready=answers.NotReady,
    ),
    Operation("get", "/metrics", "Metrics for Prometheus", errors=(400,), text="text/plain"),
)
