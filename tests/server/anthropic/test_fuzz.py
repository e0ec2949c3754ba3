"""Whatever the body, the answer is a 200 or a refusal in Anthropic's envelope: never a 500."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.sealing import seal
from chairlift.server.wire.messages import CountTokensRequest, MessagesRequest
from chairlift.server.wire.parameters import MESSAGES
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import COUNT, JSON, MESSAGES_PATH, refusal
from tests.server.harness import MODEL, lift
from tests.server.test_fuzz import FUZZ, text, value

KINDS = [
    "text",
    "image",
    "document",
    "search_result",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
]
source = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["base64", "url", "text", "content", "file"])},
        optional={
            "data": text,
            "url": text,
            "media_type": st.sampled_from(["image/png", "text/plain", "application/pdf"]),
            "content": st.one_of(text, value),
        },
    ),
    value,
)
block = st.deferred(
    lambda: st.one_of(
        st.builds(lambda words: {"type": "text", "text": words}, text),
        st.fixed_dictionaries(
            {"type": st.sampled_from(KINDS)},
            optional={
                "text": text,
                "source": source,
                "thinking": text,
                "signature": st.one_of(text, st.just(seal("a"))),
                "data": text,
                "id": st.sampled_from(["1", "2"]),
                "tool_use_id": st.sampled_from(["1", "2"]),
                "name": st.sampled_from(["look", ""]),
                "input": st.one_of(st.dictionaries(text, value, max_size=2), value),
                "content": st.one_of(text, st.lists(block, max_size=2)),
                "is_error": st.booleans(),
                "cache_control": st.one_of(st.none(), st.just({"type": "ephemeral"})),
            },
        ),
        value,
    )
)
words = st.builds(lambda words: {"type": "text", "text": words}, st.text("ab \n<>", max_size=5))
plain = st.just({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}})
result = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": st.sampled_from(["1", "2"])},
    optional={"content": st.lists(st.one_of(words, plain), max_size=2), "is_error": st.booleans()},
)
use = st.fixed_dictionaries(
    {
        "type": st.just("tool_use"),
        "id": st.sampled_from(["1", "2"]),
        "name": st.just("look"),
        "input": st.dictionaries(st.text("ab", max_size=2), value, max_size=2),
    }
)
thinking = st.builds(lambda words: {"type": "thinking", "thinking": words, "signature": "s"}, st.text("ab"))
good_messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.just("user"), "content": st.lists(st.one_of(words, result), min_size=1, max_size=3)}
        ),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": st.lists(st.one_of(words, use, thinking), max_size=3)}
        ),
        st.fixed_dictionaries({"role": st.just("system"), "content": st.text("ab", max_size=3)}),
    ),
    min_size=1,
    max_size=5,
)
bad_message = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.one_of(text, st.lists(block, max_size=3)),
        }
    ),
    value,
)
messages = st.one_of(good_messages, good_messages, st.lists(bad_message, max_size=3))
tool = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["look", "wait", "a b", ""]),
            "input_schema": st.one_of(st.just({"type": "object"}), value),
            "type": st.sampled_from(["custom", "web_search_20250305", "bash_20250124", None]),
            "strict": st.booleans(),
            "input_examples": st.lists(st.dictionaries(text, value, max_size=1), max_size=1),
        },
    ),
    value,
)
LOOK = {"name": "look", "input_schema": {"type": "object"}}
edit = st.fixed_dictionaries(
    {"type": st.sampled_from(["clear_thinking_20251015", "clear_tool_uses_20250919", "x"])},
    optional={
        "keep": st.one_of(
            st.just("all"),
            st.fixed_dictionaries(
                {"type": st.sampled_from(["thinking_turns", "tool_uses", "all"]), "value": st.integers(-1, 3)}
            ),
        ),
        "trigger": st.fixed_dictionaries(
            {"type": st.sampled_from(["input_tokens", "tool_uses"]), "value": st.integers(-1, 30)}
        ),
        "clear_tool_inputs": st.one_of(st.booleans(), st.lists(text, max_size=2)),
    },
)
names = sorted({*MessagesRequest.model_fields, *MESSAGES.neutral})
parameters = st.dictionaries(st.one_of(st.sampled_from(names), text), value, max_size=4)
likely = st.fixed_dictionaries(
    {},
    optional={
        "system": st.one_of(text, st.lists(block, max_size=2)),
        "temperature": st.floats(-1, 3),
        "max_tokens": st.integers(-1, 5),
        "stop_sequences": st.lists(text, max_size=3),
        "stream": st.booleans(),
        "tools": st.one_of(st.lists(tool, max_size=2), st.just([LOOK])),
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"])},
            optional={"name": st.sampled_from(["look", "x"]), "disable_parallel_tool_use": st.booleans()},
        ),
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(["enabled", "disabled", "adaptive"])},
            optional={"budget_tokens": st.integers(-1, 3), "display": st.sampled_from(["omitted", None])},
        ),
        "output_config": st.fixed_dictionaries(
            {}, optional={"effort": st.sampled_from(["low", "max", "x"]), "format": value}
        ),
        "context_management": st.fixed_dictionaries({"edits": st.lists(edit, max_size=2)}),
    },
)


def request(path: str, messages: object, more: JSON) -> tuple[str, JSON]:
    body = {"model": MODEL, "max_tokens": 9, "messages": messages, **more}
    if path == COUNT:
        for name in MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys():
            body.pop(name, None)
    return path, body


bodies = st.builds(
    request,
    st.sampled_from([MESSAGES_PATH, COUNT]),
    messages,
    st.one_of(st.just({}), likely, likely, parameters),
)


@settings(FUZZ, max_examples=30)
@given(st.lists(bodies, min_size=1, max_size=8))
def test_values(requests: list[tuple[str, JSON]]) -> None:
    async def run() -> None:
        tokenizer = FakeTokenizer(template="<think></think> enable_thinking <tool_call> tool_call.name")
        runner = FakeRunner(answering('<think>a</think>b<tool_call>\n{"name": "look", "arguments": {}}'))
        async with lift(runner, tokenizer=tokenizer, context_length=512) as server:
            for path, content in requests:
                response = await server.client.post(path, content=json.dumps(content).encode())
                if response.status_code != 200:
                    assert response.status_code in (400, 404), (content, response.text)
                    refusal(response, response.status_code)
                elif response.headers["content-type"].startswith("text/event-stream"):
                    assert response.text.endswith('data: {"type":"message_stop"}\n\n'), content
            await server.until_idle()
            assert server.runner.rows == {}

    asyncio.run(run())
