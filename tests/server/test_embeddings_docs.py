"""docs/embeddings.md and docs/api.md against the wire models."""

from __future__ import annotations

import re
from pathlib import Path

from openai.types import EmbeddingCreateParams

from chairlift.server.embedding import MOST_TEXTS
from chairlift.server.wire.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from chairlift.server.wire.tokenize import DetokenizeRequest, TokenizeRequest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "embeddings.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}")[2].partition("\n## ")[0]


def first_cells(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_every_parameter_is_in_its_table() -> None:
    assert first_cells(section("`POST /v1/embeddings`")) == set(EmbeddingRequest.model_fields)
    ranking, scoring = section("`POST /v1/rerank`").split("\n`/v1/score`")
    assert first_cells(ranking) == set(RerankRequest.model_fields)
    assert set(ScoreRequest.model_fields) <= set(re.findall(r"`([^`]+)`", scoring))


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"at most {MOST_TEXTS} texts" in PAGE and f"1 to {MOST_TEXTS} strings" in PAGE


def test_openais_library_knows_no_other_parameter() -> None:
    assert set(EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)


def test_parameters_of_tokenize() -> None:
    tokens = (DOCS / "api.md").read_text(encoding="utf-8").partition("## Tokens")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([^`]+)`", tokens))
    assert set(TokenizeRequest.model_fields) | set(DetokenizeRequest.model_fields) <= named
