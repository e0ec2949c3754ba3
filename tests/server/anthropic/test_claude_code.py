"""A session as Claude Code sends it (version 2.1, seen against a stand-in server), with words of our own."""

from __future__ import annotations

import json

import httpx

from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import events_of
from tests.server.harness import MODEL, Lift, lift

JSON = dict[str, object]

HEADERS = {
    "Accept": "application/json",
    "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "X-Claude-Code-Session-Id": "76853ae2-dde9-4d1d-a84a-367355b5a7f8",
    "X-Stainless-Lang": "js",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "x-api-key": "none",
    "x-app": "cli",
}
KEPT = {"type": "ephemeral"}
USER_ID = json.dumps({"device_id": "1c7e", "account_uuid": "", "session_id": "7685"})


def text(words: str, **more: object) -> JSON:
    return {"type": "text", "text": words, **more}


def tool(name: str, **properties: object) -> JSON:
    return {
        "name": name,
        "description": f"{name} does what it says. " * 120,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": sorted(properties),
            "additionalProperties": False,
        },
    }


TOOLS = [
    tool("Bash", command={"type": "string"}, timeout={"type": "number", "exclusiveMinimum": 0}),
    tool("Read", file_path={"type": "string", "pattern": r"^(?!.*\.\.)/.+$"}, limit={"type": "integer"}),
    tool(
        "Agent",
        model={"type": "string", "enum": ["a", "b"]},
        options={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        either={"anyOf": [{"type": "string", "minLength": 1}, {"const": None}], "default": None},
        url={"type": "string", "format": "uri"},
    ),
    *(tool(f"Task{number}", taskId={"type": "string"}) for number in range(21)),
]


def body(*messages: object, stamp: str = "1c0") -> JSON:
    return {
        "model": MODEL,
        "messages": [
            {
                "role": "user",
                "content": [
                    text("<system-reminder>\nToday is a good day.\n</system-reminder>"),
                    text("Run the tests", cache_control=KEPT),
                ],
            },
            {"role": "system", "content": "Kinds of agents: one."},
            *messages,
        ],
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2.1.197.{stamp}; cc_entrypoint=sdk-cli;"),
            text("You are an agent.", cache_control={**KEPT, "ttl": "1h", "scope": "global"}),
            text("\nYou help.\n", cache_control=KEPT),
        ],
        "tools": TOOLS,
        "metadata": {"user_id": USER_ID},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


async def send(server: Lift, request: JSON) -> httpx.Response:
    return await server.client.post("/v1/messages?beta=true", json=request, headers=HEADERS)


async def test_a_session() -> None:
    call = '<tool_call>\n{"name": "Bash", "arguments": {"command": "make", "timeout": 5}}\n</tool_call>'
    tokenizer = FakeTokenizer(template="<tool_call> tool_call.name")
    runner = FakeRunner(answering(tokenizer.marked("I run them.\n" + call)))
    async with lift(runner, tokenizer=tokenizer, context_length=131_072) as server:
        assert len(json.dumps(body())) > 50_000
        first = events_of(await send(server, body()))
        kinds = [(event["type"], event.get("content_block", {}).get("type")) for event in first]  # type: ignore[attr-defined]
        assert kinds[0] == ("message_start", None)
        assert [kind for kind in kinds if kind[0] == "content_block_start"] == [
            ("content_block_start", "text"),
            ("content_block_start", "tool_use"),
        ]
        *_, ending, stop = first
        assert ending["delta"]["stop_reason"] == "tool_use"  # type: ignore[index]
        assert ending["context_management"] == {"applied_edits": []}
        assert stop == {"type": "message_stop"}
        use = next(e["content_block"] for e in first if e.get("content_block", {}).get("type") == "tool_use")  # type: ignore[attr-defined]
        assert isinstance(use, dict) and use["name"] == "Bash"

        runner.draw = answering("All pass.")
        answer: JSON = {
            "role": "assistant",
            "content": [
                text("I run them."),
                {**use, "input": {"command": "make", "timeout": 5}, "caller": {"type": "direct"}},
            ],
        }
        result: JSON = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": "3 passed",
            "is_error": False,
            "cache_control": KEPT,
        }
        reminder = text("<system-reminder>\nBe brief.\n</system-reminder>")
        second = events_of(
            await send(server, body(answer, {"role": "user", "content": [result, reminder]}, stamp="fb7"))
        )
        assert (
            "".join(
                event["delta"].get("text", "")  # type: ignore[attr-defined]
                for event in second
                if event["type"] == "content_block_delta"
            )
            == "All pass."
        )
        assert second[-2]["delta"]["stop_reason"] == "end_turn"  # type: ignore[index]

    prompts: dict[int, bytes] = {}
    for span in (span for plan in runner.plans for span in plan.prefill):
        prompts[span.row] = prompts.get(span.row, b"") + bytes(token for token in span.tokens if token < 256)
    *_, first_prompt, second_prompt = prompts.values()
    assert b"You are an agent." in first_prompt and b"billing" not in first_prompt
    assert second_prompt.startswith(first_prompt)  # so all of it can be reused
    tools = tokenizer.template_arguments[0]["tools"]
    assert isinstance(tools, list) and len(tools) == 24
    assert tools[1]["function"]["parameters"] == TOOLS[1]["input_schema"]
