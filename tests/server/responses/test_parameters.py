"""Which parameters work, have no effect or are refused: the code, OpenAI's types and docs/api.md agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args, get_type_hints

from openai.types.responses import ResponseIncludable, ToolParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from chairlift.server.wire.base import Generated
from chairlift.server.wire.parameters import RESPONSES
from chairlift.server.wire.responses import HOSTED_TOOLS, Includable, ResponsesRequest
from tests.server.harness import MODEL, error_of, lift

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
NO_EFFECT = {"user", "safety_identifier", "prompt_cache_key", "client_metadata"}


def table(after: str) -> dict[str, str]:
    """Parameter: second cell, of the first table behind a line."""
    section = DOCS.read_text().split("\n## Responses\n")[1].split(after)[1].split("\n\n|", 1)[1]
    rows = section.split("\n\n")[0].splitlines()
    return {match[1]: match[2] for row in rows if (match := re.match(r"\| `(\w+)` \| (.*?) \|", row))}


def test_the_documentation_lists_what_the_code_does() -> None:
    works = table("a chat.")
    assert set(works) == set(ResponsesRequest.model_fields)
    assert {name for name, cell in works.items() if cell == "no effect"} == NO_EFFECT
    assert {name for name, cell in works.items() if cell == "works"} == set(works) - NO_EFFECT
    refused = table("Refused, unless null or the value given:")
    values = {name: tuple(map(json.loads, re.findall(r"`(.*?)`", cell))) for name, cell in refused.items()}
    assert values == RESPONSES.neutral


def test_every_parameter_of_openai_is_decided_on() -> None:
    ours = set(ResponsesRequest.model_fields) | set(RESPONSES.neutral)
    theirs = set(ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= ours
    more = {"chat_template_kwargs", "client_metadata", "enable_thinking"}
    more |= {"structured_outputs", "thinking_token_budget"}
    assert ours - theirs == set(Generated.model_fields) - theirs | more


async def test_a_tool_whose_type_is_no_text_is_refused() -> None:
    async with lift() as server:
        for kind in ({"a": 1}, [], 5, None):
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                body = {"model": MODEL, "input": "a", "tools": [{"type": kind}]}
                error = error_of(await server.client.post(path, json=body), 400)
                assert error["param"] == "tools[0]"


def test_every_tool_of_openai_is_known() -> None:
    kinds: set[str] = set()
    for tool in get_args(ToolParam):
        (kind,) = [get_type_hints(tool, include_extras=False)["type"]]
        kinds |= set(get_args(kind))
    assert kinds == HOSTED_TOOLS | {"function"}


def test_whatever_openai_includes_is_known() -> None:
    assert set(get_args(Includable)) == set(get_args(ResponseIncludable))
