"""Which of Anthropic's parameters work, have no effect or are refused: code and docs/api.md agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from anthropic.types import message_count_tokens_params as count_types
from anthropic.types import message_create_params as create_types
from anthropic.types.beta import message_count_tokens_params as beta_count_types
from anthropic.types.beta import message_create_params as beta_create_types

from chairlift.server.wire.messages import CountTokensRequest, MessagesRequest
from chairlift.server.wire.parameters import COUNT_TOKENS, MESSAGES
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import COUNT, MESSAGES_PATH, ask, refusal
from tests.server.harness import lift

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
FIELDS = {"messages": set(MessagesRequest.model_fields), "count": set(CountTokensRequest.model_fields)}
SURFACES = {"messages": MESSAGES, "count": COUNT_TOKENS}
PATHS = {"messages": MESSAGES_PATH, "count": COUNT}
NO_EFFECT = {"messages": {"cache_control", "metadata", "service_tier"}, "count": {"cache_control"}}
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of the SDK that it sends as headers."""


def tables() -> list[dict[str, tuple[str, str]]]:
    """Parameter: (messages, count), of the two tables."""
    section = DOCS.read_text().split("## Anthropic's messages\n")[1].split("\n#")[0]
    found: list[dict[str, tuple[str, str]]] = []
    for line in section.splitlines():
        if line.startswith("| parameter |"):
            found.append({})
        elif match := re.match(r"\| `(\w+)` \| (.*?) \| (.*?) \|", line):
            assert match[1] not in found[-1]
            found[-1][match[1]] = (match[2], match[3])
    return found


@pytest.mark.parametrize(("column", "name"), [(0, "messages"), (1, "count")])
def test_the_documentation_lists_what_the_code_does(column: int, name: str) -> None:
    works, refused = tables()
    assert {p for p, cells in works.items() if cells[column] != "–"} == FIELDS[name]
    assert {p for p, cells in works.items() if cells[column] == "no effect"} == NO_EFFECT[name]
    assert {p for p, cells in refused.items() if cells[column] != "–"} == set(SURFACES[name].neutral)
    for parameter, values in SURFACES[name].neutral.items():
        listed = tuple(json.loads(value) for value in re.findall(r"`(.*?)`", refused[parameter][column]))
        assert listed == values


@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        ("messages", create_types.MessageCreateParamsBase),
        ("messages", create_types.MessageCreateParamsStreaming),
        ("messages", beta_create_types.MessageCreateParamsBase),
        ("count", count_types.MessageCountTokensParams),
        ("count", beta_count_types.MessageCountTokensParams),
    ],
)
def test_every_parameter_of_anthropic_is_decided_on(name: str, upstream: type) -> None:
    assert set(upstream.__annotations__) - HEADERS <= FIELDS[name] | set(SURFACES[name].neutral)


@pytest.mark.parametrize("name", ["messages", "count"])
async def test_neutral_values_pass_and_others_are_refused_by_name(name: str) -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        for parameter, values in SURFACES[name].neutral.items():
            for value in (None, *values):
                response = await ask(server, PATHS[name], **{parameter: value})
                assert response.status_code == 200, (parameter, value, response.text)
            error = refusal(await ask(server, PATHS[name], **{parameter: "something else"}), 400)
            assert error["type"] == "invalid_request_error"
            assert parameter in str(error["message"])


async def test_what_has_no_effect() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        plain = await ask(server)
        hinted = await ask(
            server,
            metadata={"user_id": "u"},
            service_tier="standard_only",
            cache_control={"type": "ephemeral", "ttl": "1h"},
        )
        assert hinted.status_code == 200, hinted.text
        assert hinted.json()["usage"] == plain.json()["usage"]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"banana": 1}, "banana"),
    ({"model": None}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "id": "x"}]}, "messages[0].id"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image", "text": "x"}]}, "system[0].type"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stream": 1}, "stream"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"output_format": {"type": "json_object"}}, "output_format.type"),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "output_format",
    ),
    (
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "context_management.edits[0]",
    ),
    (
        {
            "context_management": {
                "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]
            }
        },
        "context_management.edits[0].keep.value",
    ),
    (
        {
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]
            }
        },
        "context_management.edits[0].keep.value",
    ),
    (
        {
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "days", "value": 1}}]
            }
        },
        "context_management.edits[0].trigger",
    ),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
]


async def test_values_that_are_refused() -> None:
    async with lift() as server:
        for more, place in REFUSED:
            error = refusal(await ask(server, **more), 400)
            assert error["type"] == "invalid_request_error"
            assert place in str(error["message"]), (more, error)
        assert server.engine.stats().prompt_tokens == 0
