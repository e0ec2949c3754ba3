"""Whatever the body or the query, the answer is a 200 or a refusal in the envelope, and nothing is left."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.server.wire.parameters import RESPONSES as PARAMETERS
from chairlift.server.wire.responses import HOSTED_TOOLS, ResponsesRequest
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, error_of, lift
from tests.server.responses.asking import RESPONSES, body, checked, events_of
from tests.server.test_fuzz import text, value

part = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "input_file"])},
        optional={"text": value, "refusal": text, "image_url": text, "annotations": value},
    ),
    value,
)
kinds = [
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "reasoning",
    "item_reference",
]
item = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from([*kinds, "item_reference", "web_search_call", None]),
            "role": st.sampled_from(["user", "assistant", "system", "developer", "x"]),
            "content": st.one_of(text, st.lists(part, max_size=3), value),
            "id": st.one_of(text, value),
            "call_id": st.sampled_from(["a", "b"]),
            "name": text,
            "arguments": text,
            "output": st.one_of(text, st.lists(part, max_size=2)),
            "summary": st.one_of(st.just([]), value),
            "encrypted_content": text,
        },
    ),
    value,
)
tool = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", *sorted(HOSTED_TOOLS)])},
        optional={"name": text, "parameters": value, "strict": value},
    ),
    value,
)
names = sorted(set(ResponsesRequest.model_fields) | set(PARAMETERS.neutral))
more = st.one_of(
    st.dictionaries(st.one_of(st.sampled_from(names), text), value, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "input": st.one_of(text, st.lists(item, max_size=4), value),
            "tools": st.lists(tool, max_size=3),
            "tool_choice": st.one_of(st.sampled_from(["none", "auto", "required"]), value),
            "stream": st.booleans(),
            "store": st.booleans(),
            "truncation": st.sampled_from(["auto", "disabled"]),
            "max_output_tokens": st.integers(-1, 5),
            "text": st.one_of(value, st.fixed_dictionaries({"format": value})),
            "reasoning": st.one_of(value, st.fixed_dictionaries({}, optional={"summary": value})),
        },
    ),
)
queries = st.dictionaries(
    st.one_of(st.sampled_from(["stream", "starting_after", "include[]", "limit", "order", "after"]), text),
    st.one_of(st.sampled_from(["true", "false", "-1", "5", "desc"]), text),
    max_size=2,
)
FUZZ = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(st.lists(more, min_size=1, max_size=8))
def test_bodies(given_bodies: list[JSON]) -> None:
    async def run() -> None:
        async with lift(FakeRunner(answering("abcdef")), context_length=64) as server:
            for asked in given_bodies:
                content = json.dumps({**body(), **asked}).encode()
                response = await server.client.post(RESPONSES, content=content)
                if response.status_code != 200:
                    assert response.status_code in (400, 404), (content, response.text)
                    error_of(response, response.status_code)
                elif response.headers["content-type"].startswith("text/event-stream"):
                    events_of(response)
                else:
                    checked(response.json())
            await server.until_idle()
            assert server.runner.rows == {}
            assert server.app.state.context.responses._running == {}

    asyncio.run(run())


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(["", "/input_items", "/cancel", "/x"]), queries), max_size=3))
def test_queries(asked: list[tuple[str, dict[str, str]]]) -> None:
    async def run() -> None:
        async with lift(FakeRunner(answering("abcdef"))) as server:
            made = (await server.client.post(RESPONSES, json=body())).json()["id"]
            for path, query in asked:
                for id in (made, "%ff"):
                    for method in ("GET", "POST"):
                        response = await server.client.request(
                            method, f"{RESPONSES}/{id}{path}", params=query
                        )
                        if response.status_code != 200:
                            assert response.status_code in (400, 404, 405), (path, query, response.text)
                            error_of(response, response.status_code)

    asyncio.run(run())
