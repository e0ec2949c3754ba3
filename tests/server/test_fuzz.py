"""Whatever the body, the answer is a 200 or a refusal in the envelope: never a 500, and nothing is left."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.server.wire.parameters import CHAT as CHAT_PARAMETERS
from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, COMPLETIONS, JSON, chat_body, completion_body, error_of, lift

text = st.text(st.characters(codec=None), max_size=8)
number = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, True]),
)
scalar = st.one_of(st.none(), st.booleans(), number, text)
value = st.recursive(
    scalar,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=3)),
    max_leaves=8,
)
part = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "refusal"])}, optional={"text": value}
    ),
    value,
)
function = st.fixed_dictionaries({"name": text, "arguments": text})
calls = st.lists(st.fixed_dictionaries({"function": function}), max_size=2)
message = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x", None]),
            "content": st.one_of(text, st.lists(part, max_size=3), value),
            "tool_calls": st.one_of(st.none(), calls, value),
            "name": value,
        },
    ),
    value,
)
names = sorted(
    {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids", "logprobs"}
    | {"ignore_eos", "stream", "stream_options", "top_logprobs", "echo", "user", "metadata", "model"}
    | {"chat_template_kwargs", "max_completion_tokens"}
    | set(CHAT_PARAMETERS.neutral)
)
parameters = st.dictionaries(st.one_of(st.sampled_from(names), text), value, max_size=4)
likely = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(-1, 3),
        "top_p": st.floats(-0.5, 1.5),
        "top_k": st.integers(-2, 5),
        "seed": st.integers(),
        "max_tokens": st.integers(-1, 5),
        "stop": st.one_of(text, st.lists(text, max_size=3)),
        "stream": st.booleans(),
        "logprobs": st.one_of(st.booleans(), st.integers(-1, 3)),
        "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    },
)
prompt = st.one_of(text, st.lists(text, max_size=4), st.lists(st.integers(-1, 300), max_size=4), value)


def _chat(messages: object, more: JSON) -> tuple[str, JSON]:
    return CHAT, {**chat_body(), **more, **({} if messages is None else {"messages": messages})}


def _complete(prompt: object, more: JSON) -> tuple[str, JSON]:
    return COMPLETIONS, {**completion_body(), "prompt": prompt, **more}


more = st.one_of(parameters, likely)
bodies = st.one_of(
    st.builds(_chat, st.one_of(st.none(), st.lists(message, max_size=3)), more),
    st.builds(_complete, prompt, more),
)
raw_bodies = st.tuples(st.sampled_from([CHAT, COMPLETIONS]), st.binary(max_size=64))


def check(requests: list[tuple[str, bytes]]) -> None:
    async def run() -> None:
        async with lift(FakeRunner(answering("abcdef")), context_length=64) as server:
            for path, content in requests:
                response = await server.client.post(path, content=content)
                if response.status_code != 200:
                    assert response.status_code in (400, 404), (content, response.text)
                    error_of(response, response.status_code)
                elif response.headers["content-type"].startswith("text/event-stream"):
                    assert response.text.endswith("data: [DONE]\n\n"), content
            await server.until_idle()
            assert server.runner.rows == {}

    asyncio.run(run())


FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(st.lists(bodies, min_size=1, max_size=8))
def test_values(requests: list[tuple[str, JSON]]) -> None:
    check([(path, json.dumps(body).encode()) for path, body in requests])


@FUZZ
@given(st.lists(raw_bodies, min_size=1, max_size=8))
def test_bytes(requests: list[tuple[str, bytes]]) -> None:
    check(requests)


@FUZZ
@given(st.integers(0, 200), st.binary(min_size=1, max_size=3), st.booleans())
def test_a_good_body_with_a_fault(at: int, noise: bytes, replace: bool) -> None:
    good = json.dumps(chat_body(max_tokens=2)).encode()
    at %= len(good)
    check([(CHAT, good[:at] + noise + good[at + replace * len(noise) :])])
