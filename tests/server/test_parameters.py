"""Which parameters work, have no effect or are refused: the code, the behaviour and docs/api.md agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_types
from openai.types.chat import completion_create_params as chat_types

from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.parameters import CHAT, COMPLETIONS, Surface
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, MODEL, error_of, lift

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
FIELDS = {"chat": set(ChatRequest.model_fields), "completions": set(CompletionRequest.model_fields)}
SURFACES = {"chat": CHAT, "completions": COMPLETIONS}
NO_EFFECT = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """Parameter: (chat, completions), of the first table under a heading."""
    section = DOCS.read_text().split(f"## {heading}\n")[1].split("\n#")[0]
    table: dict[str, tuple[str, str]] = {}
    for line in section.splitlines():
        if match := re.match(r"\| `(\w+)` \| (.*?) \| (.*?) \|", line):
            assert match[1] not in table
            table[match[1]] = (match[2], match[3])
    return table


def values(cell: str) -> tuple[object, ...]:
    return tuple(json.loads(value) for value in re.findall(r"`(.*?)`", cell))


@pytest.mark.parametrize(("column", "name"), [(0, "chat"), (1, "completions")])
def test_the_documentation_lists_what_the_code_does(column: int, name: str) -> None:
    works = {parameter: cells[column] for parameter, cells in rows("Parameters that work").items()}
    assert {p for p, cell in works.items() if cell != "–"} == FIELDS[name]
    assert {p for p, cell in works.items() if cell == "no effect"} == NO_EFFECT
    refused = {p: cells[column] for p, cells in rows("Parameters that are refused").items()}
    neutral = SURFACES[name].neutral
    assert {p for p, cell in refused.items() if cell != "–"} == set(neutral) - FIELDS[name]
    for parameter in set(neutral) - FIELDS[name]:
        assert values(refused[parameter]) == neutral[parameter]


@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        ("chat", chat_types.CompletionCreateParamsBase),
        ("completions", completion_types.CompletionCreateParamsBase),
    ],
)
def test_every_parameter_of_openai_is_decided_on(name: str, upstream: type) -> None:
    assert set(upstream.__annotations__) <= FIELDS[name] | set(SURFACES[name].neutral)


OTHER = {"best_of": 3, "tools": [{"type": "function"}]}


def other_value(parameter: str) -> object:
    return OTHER.get(parameter, "something else")


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_neutral_values_pass_and_others_are_refused_by_name(name: str) -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        ask = server.chat if name == "chat" else server.complete
        for parameter in sorted(set(SURFACES[name].neutral) - FIELDS[name]):
            for value in (None, *SURFACES[name].neutral[parameter]):
                response = await ask(**{parameter: value})
                assert response.status_code == 200, (parameter, value, response.text)
            error = error_of(await ask(**{parameter: other_value(parameter)}), 400)
            assert (error["param"], error["code"]) == (parameter, "unsupported_parameter")
            assert parameter in str(error["message"])


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_what_has_no_effect(name: str) -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        ask = server.chat if name == "chat" else server.complete
        response = await ask(
            user="u", metadata={"a": "b"}, store=True, safety_identifier="s", prompt_cache_key="k"
        )
    assert response.status_code == 200, response.text


def test_one_is_not_true() -> None:
    surface = Surface({"n": (1,), "flag": (True,), "penalty": (0,)})
    assert surface.is_neutral("n", 1) and not surface.is_neutral("n", True)
    assert surface.is_neutral("flag", True) and not surface.is_neutral("flag", 1)
    assert surface.is_neutral("penalty", 0.0) and surface.is_neutral("penalty", None)
    assert not surface.is_neutral("unknown", None)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"banana": 1}, "banana"),
    ({"banana": None}, "banana"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"min_p": 2}, "min_p"),
    ({"xtc_probability": 1.5}, "xtc_probability"),
    ({"xtc_threshold": 0.6}, "xtc_threshold"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"97": 101}}, "logit_bias"),
    ({"logit_bias": {"97": -100.5}}, "logit_bias"),
    ({"logit_bias": {"97": "1"}}, "logit_bias.97"),
    ({"logit_bias": {"97": None}}, "logit_bias.97"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"+1": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ({"logit_bias": [[97, 1]]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [260]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": "a"}, "allowed_token_ids"),
    ({"allowed_token_ids": [257, 259, 97], "stop_token_ids": [97], "min_tokens": 1}, "allowed_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**300}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": False}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": ["a", "b" * 2**20]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, 260]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {}, "stream": False}, "stream_options"),
    ({"stream_options": {"include_usage": "x"}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"other": 1}, "stream": True}, "stream_options.other"),
    (
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
        "stream_options.continuous_usage_stats",
    ),
    ({"stream_options": True, "stream": True}, "stream_options"),
    ({"user": 1}, "user"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_values_that_are_refused(name: str) -> None:
    async with lift() as server:
        ask = server.chat if name == "chat" else server.complete
        for more, param in REFUSED:
            response = await ask(**{"max_tokens": 1, **more})
            assert response.status_code == 400, more
            error = error_of(response, 400)
            assert error["param"] == param, (more, error)
            assert param.split("[")[0] in str(error["message"]), (more, error)
        assert server.engine.stats().prompt_tokens == 0


CHAT_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": None}]},
        "messages[1].content",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


async def test_chats_that_are_refused() -> None:
    async with lift() as server:
        for more, param in CHAT_REFUSED:
            assert error_of(await server.chat(**more), 400)["param"] == param, more
        both = await server.chat(max_tokens=2, max_completion_tokens=2)
        assert both.status_code == 200


@pytest.mark.parametrize(
    ("role", "field", "value", "empty"),
    [
        *((role, "tool_calls", [CALL], []) for role in ("user", "system", "developer", "tool")),
        *((role, "function_call", CALL["function"], None) for role in ("user", "system", "function")),
        *((role, "refusal", "no", "") for role in ("user", "system", "tool")),
        *((role, "reasoning_content", "hm", "") for role in ("user", "system", "tool")),
        ("user", "reasoning", "hm", ""),
        *((role, "tool_call_id", "c1", None) for role in ("user", "system", "assistant", "function")),
    ],
)
async def test_fields_of_another_role_are_refused(
    role: str, field: str, value: object, empty: object
) -> None:
    async with lift() as server:
        message: JSON = {"role": role, "content": "a"}
        before: list[JSON] = [{"role": "assistant", "tool_calls": [CALL]}] if role == "tool" else []
        place = f"messages[{len(before)}].{field}"
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"model": MODEL, "messages": [*before, {**message, field: value}]}
            error = error_of(await server.client.post(path, json=body), 400)
            assert (error["param"], error["code"]) == (place, "unsupported_parameter")
        null = await server.chat(messages=[*before, {**message, field: empty}], max_tokens=1)
        assert null.status_code == 200, null.text


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file", "audio_url", "input_image", "banana"])
async def test_parts_of_other_kinds_are_refused_by_name(kind: str) -> None:
    text = {"type": "text", "text": "What is this?"}
    part = {"type": kind, kind: {"url": "data:,"}}
    async with lift() as server:
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [text, part]}]
        error = error_of(await server.chat(messages=messages), 400)
    assert (error["param"], error["code"]) == ("messages[1].content[1]", "unsupported_parameter")
    assert str(error["message"]).startswith(f"{kind} parts")
