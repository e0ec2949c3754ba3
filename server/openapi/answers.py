"""What goes out on OpenAI's and vLLM's endpoints, for the description of the API. Nothing is made of these at
run time: encoders write their payloads directly, and a test holds them against this.

Sources: OpenAI's API reference; vLLM's documentation, Tokenizer, Score and Re-rank API.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Out(BaseModel):
    model_config = ConfigDict(extra="forbid")


# -- errors


class ErrorDetail(Out):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Out):
    error: ErrorDetail


class AnthropicErrorDetails(Out):
    error_code: str


class AnthropicErrorDetail(Out):
    type: str
    message: str
    details: AnthropicErrorDetails | None = None


class AnthropicError(Out):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


# -- chat and completions


class PromptDetails(Out):
    cached_tokens: int


class CompletionDetails(Out):
    reasoning_tokens: int


class Usage(Out):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenLogprob(Out):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Out):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Out):
    name: str
    arguments: str


class CalledTool(Out):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Out):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Out):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Out):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Out):
    name: str | None = None
    arguments: str


class ToolDelta(Out):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Out):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatChunkChoice(Out):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Out):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Out):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt, as in `top_logprobs`."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Out):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Out):
    """Also a chunk of a stream, where `usage` is null or absent but in the last one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


# -- tokens


class Tokens(Out):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Out):
    prompt: str


# -- the prefix cache


class CacheCleared(Out):
    object: Literal["cache.cleared"]
    memory_bytes: int
    disk_bytes: int


class CacheWarmed(Out):
    object: Literal["cache.warmed"]
    tokens: int
    pinned_tokens: int
    pinned_bytes: int


# -- embeddings and scores


class InputUsage(Out):
    prompt_tokens: int
    total_tokens: int


class Embedding(Out):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingList(Out):
    object: Literal["list"]
    model: str
    usage: InputUsage
    data: list[Embedding]


class RankedText(Out):
    text: str


class Ranked(Out):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Out):
    id: str
    model: str
    usage: InputUsage
    results: list[Ranked]


class Score(Out):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(Out):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


# -- health


class Health(Out):
    status: Literal["ok", "loading", "draining", "stalled"]
    last_step_age_s: float | None = None
    stalled_s: float | None = None
    busy: bool | None = None
    running: int | None = None
    waiting: int | None = None
    error: ErrorDetail | None = Field(default=None)


class Ready(Out):
    status: Literal["ready"]


class NotReady(Out):
    status: Literal["loading", "draining"]
    error: ErrorDetail
