"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, as they come in.

Sources: OpenAI's API reference, Embeddings; Jina's, Reranker, and Cohere's, Rerank, as vLLM's documentation
joins them; for the score, vLLM's, Score API.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Discriminator

from chairlift.server.wire.base import OBJECT, TEXT, Count, Texts, Wire, text_or_object
from chairlift.server.wire.completions import Prompt
from chairlift.server.wire.parameters import Surface


class EmbeddingRequest(Wire):
    model: str
    input: Prompt
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    """vLLM's: of text; default true."""
    truncate_prompt_tokens: Count | None = None
    """vLLM's: -1 cuts to what the model takes."""


class DocumentText(Wire):
    text: str


Document = Annotated[Annotated[str, TEXT] | Annotated[DocumentText, OBJECT], Discriminator(text_or_object)]


class RerankRequest(Wire):
    model: str
    query: str
    documents: list[Document]
    top_n: Count | None = None
    """0 and null: all."""
    return_documents: bool | None = None
    """Default true."""
    user: str | None = None
    truncate_prompt_tokens: Count | None = None


class ScoreRequest(Wire):
    model: str
    text_1: Texts
    text_2: Texts
    user: str | None = None
    truncate_prompt_tokens: Count | None = None


_ALL = {
    "cache_salt": (),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "request_id": (),
    "truncation_side": ("right",),
}
EMBEDDINGS = Surface(
    MappingProxyType(
        {
            **_ALL,
            "embed_dtype": ("float32",),
            "endianness": ("native", "little"),
            "input_type": (),
            "messages": (),
            "normalize": (True,),
        }
    )
)
RERANK = Surface(
    MappingProxyType({**_ALL, "activation": (True,), "max_chunks_per_doc": (), "max_tokens_per_doc": ()})
)
SCORE = Surface(MappingProxyType({**_ALL, "activation": (True,)}))
